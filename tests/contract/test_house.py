"""House rules that a reader should not have to check: signatures, docstrings, sizes, errors."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml

from perturbdiff import _errors

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "perturbdiff"
MODULES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in MODULES}
TOOLS = ("pp", "tl", "pl")
USED = {  # rooms that users call; the others are read by those who change them
    "perturbdiff",
    *(
        f"perturbdiff.{room}"
        for room in ("data", "data.datasets", "metrics", "profiling", "train", *TOOLS)
    ),
}
BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
ROOMS = sorted(
    ".".join(path.parent.relative_to(ROOT).parts) for path in MODULES if path.name == "__init__.py"
)


def public(room):
    """Everything that a room offers, by name."""
    module = importlib.import_module(room)
    return {name: getattr(module, name) for name in getattr(module, "__all__", ())}


def functions(room):
    """Functions that a room offers."""
    return {k: inspect.unwrap(v) for k, v in public(room).items() if inspect.isfunction(v)}


def methods(room):
    """Public methods of the classes that a room offers."""
    return {
        f"{name}.{key}": inspect.unwrap(getattr(member, "__func__", member))
        for name, thing in public(room).items()
        if inspect.isclass(thing)
        for key, member in vars(thing).items()
        if not key.startswith("_") and inspect.isfunction(getattr(member, "__func__", member))
    }


def section(doc, title):
    """Text of one section of a numpy docstring, or None."""
    end = r"(?=^\S[^\n]*\n-{3,}\n|\Z)"
    found = re.search(rf"^{title}\n-{{{len(title)}}}\n(.*?){end}", doc, re.M | re.S)
    return found and found[1]


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_says_what_it_offers(room):
    module = importlib.import_module(room)
    assert module.__doc__
    missing = [n for n in getattr(module, "__all__", ()) if not hasattr(module, n)]
    assert not missing


@pytest.mark.parametrize("room", ROOMS)
def test_at_most_three_positional_parameters_and_a_stated_return(room):
    problems = []
    for name, function in (functions(room) | methods(room)).items():
        signature = inspect.signature(function)
        kinds = {k: p.kind for k, p in signature.parameters.items() if k not in ("self", "cls")}
        by_position = [k for k, kind in kinds.items() if kind in BY_POSITION]
        if len(by_position) > 3 and by_position[0] != "denoise":  # the contract of a sampler's step
            problems.append(f"{name}: {len(by_position)} positional parameters")
        if signature.return_annotation is signature.empty:
            problems.append(f"{name}: no return annotation")
        if inspect.Parameter.VAR_KEYWORD in kinds.values():
            problems.append(f"{name}: takes any keyword")
    assert not problems


@pytest.mark.parametrize("room", ROOMS)
def test_functions_are_documented(room):
    problems = []
    for name, function in functions(room).items():
        doc, signature = inspect.getdoc(function) or "", inspect.signature(function)
        if not doc:
            problems.append(f"{name}: no docstring")
        if room not in USED:
            continue
        heads = re.findall(r"^\S.*$", section(doc, "Parameters") or "", re.M)
        named = set(re.findall(r"\w+", " ".join(heads)))
        if unnamed := set(signature.parameters) - named:
            problems.append(f"{name}: parameters without a word: {sorted(unnamed)}")
        if signature.return_annotation not in (None, "None") and not section(doc, "Returns"):
            problems.append(f"{name}: no Returns section")
    assert not problems


@pytest.mark.parametrize("room", [room for room in ROOMS if room.split(".")[-1] in TOOLS])
def test_tools_take_an_anndata_first(room):
    offered = functions(room)
    assert offered
    for name, function in offered.items():
        if name == "roofline":  # draws a report of costs, which is of no cells
            continue
        first = next(iter(inspect.signature(function).parameters.values()))
        assert first.name in ("adata", "pred")
        assert "AnnData" in str(first.annotation)
        assert section(inspect.getdoc(function) or "", "Returns")


def test_what_is_written_into_an_anndata_can_be_written_into_a_copy():
    for room in ("perturbdiff.pp", "perturbdiff.tl"):
        for name, function in functions(room).items():
            signature = inspect.signature(function)
            if "None" not in str(signature.return_annotation):
                assert "copy" not in signature.parameters, name
                continue
            assert signature.parameters["copy"].default is False, name
            assert "AnnData" in str(signature.return_annotation), name
            returned = section(inspect.getdoc(function), "Returns")
            assert "``copy=True``, else None. Sets " in " ".join(returned.split()), name


def test_plots_are_drawn_shown_and_saved_alike():
    for name, function in functions("perturbdiff.pl").items():
        parameters = inspect.signature(function).parameters
        assert [*parameters][-3:] == ["ax", "show", "save"], name
        assert all(parameters[key].default is None for key in ("ax", "show", "save")), name
        names_genes = {"genes", "n_genes"} & {*parameters}
        assert bool(names_genes) == ("gene_symbols" in parameters), name
        assert "Axes" in str(inspect.signature(function).return_annotation), name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_are_small(path):
    assert len(path.read_text().splitlines()) <= 600
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines < 60, f"{node.name} has {lines} lines"


# Errors

ERRORS = {
    name
    for name, kind in vars(_errors).items()
    if inspect.isclass(kind)
    and issubclass(kind, Exception)
    and kind is not _errors.PerturbDiffError
}


def names_in(node):
    """Names and attributes that occur under a node."""
    found = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return found | {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}


def calls(tree, name):
    """Calls of ``….name(…)`` or ``name(…)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called == name:
                yield node


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_every_error_is_built_in_kind_too_and_explained(name):
    kind = getattr(_errors, name)
    assert issubclass(kind, _errors.PerturbDiffError)
    assert any(issubclass(kind, built) for built in (ValueError, KeyError, RuntimeError, OSError))
    assert kind.__doc__


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_every_error_is_raised_by_the_package_and_by_some_test(name):
    raised = {
        child
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.exc is not None
        for child in names_in(node.exc)
    }
    assert name in raised, "never raised"
    expected = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        for function in ("raises", "parametrize"):
            for call in calls(tree, function):
                expected |= names_in(call)
    assert name in expected, "no test expects it"


def test_nothing_prints_and_nothing_names_a_machine():
    for path, tree in TREES.items():
        assert not list(calls(tree, "print")), path
        assert not re.search(r"(?<![\w.])/(home|root|work|mnt)/", path.read_text()), path


# Settings

CONFIGS = sorted((ROOT / "configs").rglob("*.y*ml"))
PARTS = {
    "model": "NetworkConfig",
    "decoder": "DecoderConfig",
    "train": "TrainConfig",
    "sample": "SampleConfig",
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_of_settings_loads(path):
    settings = yaml.safe_load(path.read_text())
    assert isinstance(settings, dict)
    folder = path.parent.name
    if folder in PARTS:
        config = importlib.import_module("perturbdiff.config")
        getattr(config, PARTS[folder])(**settings)
    elif folder == "runs":
        for part, name in settings.items():
            if (ROOT / "configs" / part).is_dir():
                assert (ROOT / "configs" / part / f"{name}.yaml").exists(), f"{part}: {name}"
