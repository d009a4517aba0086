"""What a folder carries and never uses: an option of another family in a block of all, or what nothing calls any more.

A definition of model.py or fast.py counts as used if a file of the folder names it. A parameter with a default and a
field with one count as set if a call in the folder gives them. Only names are compared, so a method's users are those
of all methods of this name.
"""

import ast
import functools
from collections import Counter, defaultdict

import pytest
from shared import ROOT, folders

FILES = ("model", "fast", "generate", "convert", "main")
REMEDY = "what only some folders need is a block of its own, a field of config.json stands in ALLOWED (CONTRIBUTING.md)"
ALLOWED = {
    "the benchmarks': programs that are compiled ahead of time": {"abstract_weights"},
    "the tests': kernels that are interpreted, and in small blocks": {
        "decode_kernel(block)", "decode_kernel(interpret)", "delta_kernel(interpret)", "exchange_kernel(interpret)",
        "expert_kernel(interpret)", "expert_kernel(tile)", "grouped_routing_kernel(interpret)",
        "index_kernel(interpret)", "lowest_kernel(interpret)", "prefill_kernel(block)", "prefill_kernel(interpret)",
        "prefill_kernel(queries)", "routing_kernel(interpret)",
        "streamed_product(block)", "streamed_product(interpret)", "tiled_experts(interpret)",
        "triton_attention(interpret)", "triton_int4_product(interpret)",
    },
    "config.json's: read_rope gives what stands there": {
        "ProportionalRope.factor", "YarnRope.attention_factor", "YarnRope.beta_fast", "YarnRope.beta_slow",
        "YarnRope.mscale", "YarnRope.mscale_all_dim", "YarnRope.truncate",
    },
    "one Mask for all kernels": {"Mask.chosen", "Mask.chunk", "Mask.softcap", "Mask.window"},
    "a line, where a hook would take more text": {
        "cached_attention(sinks)", "linear(bias)", "routing_kernel(limit)", "store(is_own)", "store_many(is_own)",
        "experts(gate_up_bias)", "cpu_experts(gate_up_bias)", "gpu_experts(gate_up_bias)", "tpu_experts(gate_up_bias)",
    },
    "a model has its own norm, turns its heads itself, or has no groups of heads or experts": {
        "check_routing", "read_heads", "rms_norm", "rotate", "Part.groups", "Part.replicated",
    },
}  # fmt: skip


def read(folder: str) -> dict[str, str]:
    return {name: (ROOT / folder / f"{name}.py").read_text() for name in FILES}


@functools.cache
def unused_in(folder: str) -> set[str]:
    return unused(read(folder))


def unused(files: dict[str, str]) -> set[str]:
    """Names of what model.py or fast.py defines and nothing uses: `definition`, `Class.method`, `function(parameter)`,
    `Class.field`."""
    trees = {name: ast.parse(text) for name, text in files.items()}
    named, calls = Counter(), defaultdict(list)

    def name_of(node):
        return getattr(node, "id", None) or getattr(node, "attr", None)

    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    rows = [node for node in nodes if isinstance(node, ast.Subscript) and name_of(node.value) == "FAST"]
    row_names = {id(name) for row in rows for name in ast.walk(row.slice)}  # they use nothing
    for node in nodes:
        if id(node) in row_names:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # getattr(model, "name")
            named[node.value] += 1
        elif isinstance(node, (ast.Name, ast.Attribute, ast.alias)):
            named[getattr(node, "name", None) or name_of(node)] += 1
        elif isinstance(node, ast.Call):
            calls[name_of(node.func)].append((node.args, node.keywords))
            if node.args and name_of(node.func) in ("partial", "replace"):  # arguments of their first argument
                calls[name_of(node.args[0])].append((node.args[1:], node.keywords))

    for node in nodes:  # what stands in a row is called as what it replaces
        if isinstance(node, ast.Assign) and node.targets[0] in rows:
            calls[name_of(node.value)] += calls[node.targets[0].slice.elts[0].value]

    def is_given(function, name, place):
        def gives(arguments, keywords):
            by_place = any(isinstance(x, ast.Starred) for x in arguments) or len(arguments) > place
            return by_place or any(keyword.arg in (name, None) for keyword in keywords)

        return any(gives(*call) for call in calls[function])

    found = set()

    def look_into(function, owner=""):
        own = sum(name_of(node) == function.name for node in ast.walk(function))
        if named[function.name] <= own and not function.name.startswith("__"):
            found.add(owner + function.name)
            return
        arguments = function.args
        places = arguments.posonlyargs + arguments.args
        is_method = bool(owner and places) and places[0].arg in ("self", "cls")
        given = [(x.arg, i - is_method) for i, x in enumerate(places)][len(places) - len(arguments.defaults) :]
        pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        given += [(x.arg, 999) for x, default in pairs if default is not None]
        found.update(f"{owner}{function.name}({x})" for x, i in given if not is_given(function.name, x, i))

    for node in (*trees["model"].body, *trees["fast"].body):
        if isinstance(node, ast.FunctionDef):
            look_into(node)
        elif isinstance(node, ast.ClassDef):
            if named[node.name] <= sum(name_of(inner) == node.name for inner in ast.walk(node)):
                found.add(node.name)
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    look_into(method, f"{node.name}.")
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            for i, field in enumerate(fields if node.name != "Config" else ()):
                set_later = any(
                    k.arg == field.target.id for name in ("replace", "_replace") for _, ks in calls[name] for k in ks
                )
                if field.value is not None and not set_later and not is_given(node.name, field.target.id, i):
                    found.add(f"{node.name}.{field.target.id}")
    return found


@pytest.mark.parametrize("folder", folders())
def test_a_folder_uses_what_it_has(folder):
    leaks = unused_in(folder) - set().union(*ALLOWED.values())
    assert not leaks, f"{folder} carries what nothing in the folder uses: {', '.join(sorted(leaks))}; {REMEDY}"


def test_the_list_is_not_longer_than_needed():
    longer = set().union(*ALLOWED.values()) - set().union(*map(unused_in, folders()))
    assert not longer, f"used or gone, so not to be allowed: {', '.join(sorted(longer))}"


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("def rms_norm(x: Array, ", "def rms_norm(x: Array, *, factor: float = 1.0, ", "rms_norm(factor)"),
        ("given: dict) -> dict:", "given: dict, planted: int = 0) -> dict:", "read_fields(planted)"),
        ("    multiple: int = 1", "    multiple: int = 1\n    planted: int = 0", "Part.planted"),
        ("def linear(", "def planted():\n    return planted\n\n\ndef linear(", "planted"),
        ("def linear(", "class Planted:\n    x: Planted\n\n\ndef linear(", "Planted"),
    ],
)
def test_a_planted_leak_is_found(before, after, name):
    files = read("llama3")
    changed = files["model"].replace(before, after, 1)
    assert changed != files["model"] and unused(files | {"model": changed}) - unused_in("llama3") == {name}
