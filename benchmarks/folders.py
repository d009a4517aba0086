"""What bench.py, plan.py and draw.py share: finding a model folder, its modules and its released sizes."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def import_from(folder: str, module: str) -> ModuleType:
    """A module of a model folder: model, convert or main. One process uses one folder: the names are the same in all.

    Raises ValueError where there is no such folder.
    """
    path = ROOT / folder
    if not (path / f"{module}.py").is_file():
        raise ValueError(f"{folder}: no such model folder")
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
    return importlib.import_module(module)


def read_config(folder: str, name: str, layers: int | None = None) -> dict:
    """config.json of a released size of the folder, or of the file `name`, cut to `layers` layers.

    Raises ValueError where there is neither, or fewer layers.
    """
    released = {file.stem: file for file in sorted((ROOT / folder / "configs").glob("*.json"))}
    file = released.get(name, Path(name))
    if not file.is_file():
        raise ValueError(f"--config {name} is neither a file nor one of {', '.join(released)}")
    config = json.loads(file.read_text())
    if layers is not None:
        if not 0 < layers <= config["num_hidden_layers"]:
            raise ValueError(f"--layers {layers} is not from 1 to the model's {config['num_hidden_layers']}")
        config["num_hidden_layers"] = layers
    return config
