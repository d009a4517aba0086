"""Programs that tests start find no torch, as on most machines that run main.py. transformers would import it, for
seconds."""

import importlib.util

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)
