"""The shape of the repository: import order, what may be imported where, the links, and what a wheel contains.

Imports are read from the syntax tree, so a module need not be importable (or its GPU library installed) to be judged.
Each rule is a function from source text to what breaks it, and is itself tested on text that breaks it.
"""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("dist", "models", "spec", "minieagle")
LINKED = ORDER[:3]
SOURCES = sorted(path for folder in ORDER for path in (ROOT / folder).glob("*.py"))
USERS = sorted(path for folder in ("tests", "bench") for path in (ROOT / folder).glob("*.py"))

# Modules that run code from the bytes they read, or whose queues and calls do; torch.load, numpy's and the *_object*
# collectives do so too.
UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "shelve"}
UNPICKLING = re.compile(
    r"(^|\.)(all_gather|broadcast|gather|recv|scatter|send)_object(_list)?$"
    r"|^torch\.(load|multiprocessing|distributed\.rpc)($|\.)|^(np|numpy)\.load$|(^|\.)ProcessPoolExecutor$"
)
MACHINE_PATH = re.compile(r"(?<![\w.~/:-])/(home|mnt|opt|root|tmp|Users|work)/\w")
REGISTRY_HOST = re.compile(r"\b(debian|npmjs|pypi|pythonhosted)\.(com|io|net|org)\b|--(extra-)?index-url")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(node: ast.AST, package: str) -> list[str]:
    """The full names that an import statement of a module in `package` binds; none for any other node."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1] if node.level else []
    module = ".".join([*above, *([node.module] if node.module else [])])
    return [f"{module}.{alias.name}" for alias in node.names]


def imports(text: str, package: str = "minieagle") -> set[str]:
    return {name for node in ast.walk(ast.parse(text)) for name in imported(node, package)}


def package_of(folder: str) -> str:
    return f"minieagle.{folder}" if folder in LINKED else folder


def layer(name: str) -> str | None:
    """The folder that an imported name comes from, or None where it is not one of ours."""
    root, _, rest = name.partition(".")
    if root != "minieagle":
        return root if root in ("tests", "bench") else None
    inner = rest.partition(".")[0]
    return inner if inner in LINKED else "minieagle"


def backward_imports(text: str, folder: str) -> set[str]:
    allowed = {None, *ORDER[: ORDER.index(folder) + 1]}
    return {name for name in imports(text, package_of(folder)) if layer(name) not in allowed}


def bare_imports(text: str, folder: str) -> set[str]:
    """Names imported from the top-level folders themselves, which would make a second copy of every class."""
    return {name for name in imports(text, package_of(folder)) if name.partition(".")[0] in LINKED}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def mentions(text: str) -> set[str]:
    """Every name that the code (not its strings or comments) imports or spells, with dots."""
    return imports(text) | {dotted(node) for node in ast.walk(ast.parse(text))}


def distributed_mentions(text: str) -> set[str]:
    return {name for name in mentions(text) if f"{name}.".startswith("torch.distributed.")}


def unpickling(text: str) -> set[str]:
    return {name for name in mentions(text) if name.partition(".")[0] in UNPICKLERS or UNPICKLING.search(name)}


def uncommented_inner_imports(text: str) -> Iterator[str]:
    """Imports inside functions with no comment on their first line or the line before."""
    lines = text.splitlines()
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom) and "#" not in "".join(
                lines[node.lineno - 2 : node.lineno]
            ):
                yield f"line {node.lineno}: {lines[node.lineno - 1].strip()}"


def listed(*options: str) -> list[str]:
    """Paths, relative to the root, that `git ls-files` prints; skips the test outside a git checkout."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to know which files are tracked")
    done = subprocess.run(["git", "ls-files", "-z", *options], cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(path for path in done.stdout.split("\0") if path)


def tracked_text() -> Iterator[tuple[str, str]]:
    """Tracked text files. Vocabularies and corpora are data: what looks like a path in them is somebody's sentence."""
    for name in listed():
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and path.suffix not in (".safetensors", ".json", ".jsonl"):
            yield name, path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_from_dist_to_models_to_spec_to_minieagle(path: Path):
    assert backward_imports(path.read_text(), path.parent.name) == set()


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("dist", "import minieagle.models.rope"),
        ("models", "from minieagle.spec import tree"),
        ("models", "from ..spec.tree import grow"),
        ("models", "from minieagle import __version__"),
        ("spec", "def f():\n    from minieagle import engine"),
        ("minieagle", "import tests.oracle"),
    ],
)
def test_an_import_against_the_order_is_found(folder: str, text: str):
    assert len(backward_imports(text, folder)) == 1


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("models", "from minieagle.dist.group import Group"),
        ("models", "from .rope import Rope"),
        ("spec", "from minieagle import models"),
        ("minieagle", "from minieagle.spec import tree"),
    ],
)
def test_an_import_along_the_order_is_let_through(folder: str, text: str):
    assert backward_imports(text, folder) == set()


@pytest.mark.parametrize("path", SOURCES + USERS, ids=name_of)
def test_the_linked_folders_are_imported_by_their_full_names(path: Path):
    assert bare_imports(path.read_text(), path.parent.name) == set()


def test_a_bare_import_is_found():
    text = "import spec.tree\nfrom dist import group\nfrom minieagle.spec import tree"
    assert bare_imports(text, "minieagle") == {"spec.tree", "dist.group"}


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parent.name != "dist"], ids=name_of)
def test_only_dist_knows_torch_distributed(path: Path):
    assert distributed_mentions(path.read_text()) == set()


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as td",
        "from torch import distributed",
        "from torch.distributed.device_mesh import DeviceMesh",
        "torch.distributed.barrier()",
    ],
)
def test_torch_distributed_is_found_however_it_is_spelled(text: str):
    assert distributed_mentions(text)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_in_the_package_unpickles(path: Path):
    assert unpickling(path.read_text()) == set()


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path, weights_only=True)",
        "from torch import load",
        "group.broadcast_object_list(objects)",
        "all_gather_object(out, value)",
        "dist.scatter_object_list(out, values)",
        "from multiprocessing import Queue",
        "from multiprocessing.connection import Listener",
        "import torch.multiprocessing as mp",
        "from torch.distributed import rpc",
        "from concurrent.futures import ProcessPoolExecutor",
        "np.load(path)",
    ],
)
def test_unpickling_is_found_however_it_is_spelled(text: str):
    assert unpickling(text)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_an_import_inside_a_function_says_why(path: Path):
    assert list(uncommented_inner_imports(path.read_text())) == []


def test_a_silent_import_inside_a_function_is_found():
    assert list(uncommented_inner_imports("def f():\n    import flashinfer"))
    assert not list(uncommented_inner_imports("def f():\n    # heavy, and only on CUDA\n    import flashinfer"))


def test_no_module_in_minieagle_shadows_the_standard_library():
    # `python minieagle/serve.py` puts minieagle/ first on the path, where a types.py would be everyone's `types`.
    assert {path.stem for path in (ROOT / "minieagle").iterdir()} & sys.stdlib_module_names == set()


@pytest.mark.parametrize("folder", LINKED)
def test_a_link_is_relative_and_leads_to_the_folder(folder: str):
    link = ROOT / "minieagle" / folder
    assert link.readlink() == Path("..", folder)
    assert link.resolve() == ROOT / folder


def test_the_links_are_committed_as_links():
    modes = {line.split("\t")[1]: line[:6] for line in listed("--stage", "minieagle")}
    assert {modes[f"minieagle/{folder}"] for folder in LINKED} == {"120000"}


def test_a_new_file_in_dist_is_seen_by_git():
    assert "dist/group.py" in listed()
    ignored = subprocess.run(["git", "check-ignore", "--quiet", "dist/new_module.py"], cwd=ROOT)
    assert ignored.returncode == 1


def test_no_tracked_file_names_a_path_of_some_machine():
    assert [name for name, text in tracked_text() if MACHINE_PATH.search(text)] == []


def test_no_tracked_file_names_a_package_registry():
    assert [name for name, text in tracked_text() if REGISTRY_HOST.search(text)] == []


@pytest.mark.parametrize("text", ["/" + "home/someone/model", 'open("/' + 'tmp/x")', "at /" + "work/shared"])
def test_a_machine_path_is_found(text: str):
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize("text", ["../work/x", "build/tmp/x", "/v1/models", "https://host/home/page", "~/tmp/x"])
def test_what_is_no_machine_path_is_let_through(text: str):
    assert not MACHINE_PATH.search(text)


def copy_of_the_tree(target: Path) -> Path:
    """The files that git has or would take, links kept, so that a build leaves nothing behind in the checkout."""
    for name in listed("--cached", "--others", "--exclude-standard"):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name, follow_symlinks=False)
    return target


def break_links(tree: Path) -> None:
    """What git leaves where links are not supported: a text file with the link's target."""
    for folder in LINKED:
        (tree / "minieagle" / folder).unlink()
        (tree / "minieagle" / folder).write_text(f"../{folder}")


def names_in_wheel(tree: Path, out: Path) -> set[str]:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(tree)], check=True)
    (wheel,) = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def expected_names() -> set[str]:
    """Every module of the four folders, and every file of assets/, by its name under minieagle/."""
    modules = {f"{package_of(path.parent.name).replace('.', '/')}/{path.name}" for path in SOURCES}
    assets = (ROOT / "minieagle" / "assets").rglob("*.*")
    return modules | {"minieagle/py.typed"} | {name_of(path) for path in assets}


@pytest.mark.skipif(not importlib.util.find_spec("setuptools"), reason="building a wheel offline needs setuptools")
@pytest.mark.parametrize("links", [True, False], ids=["links", "links as text files"])
def test_a_wheel_holds_minieagle_whole_and_nothing_else(tmp_path: Path, links: bool):
    tree = copy_of_the_tree(tmp_path / "tree")
    if not links:
        break_links(tree)
    names = names_in_wheel(tree, tmp_path / "out")
    own = {name for name in names if ".dist-info/" not in name}
    assert own == expected_names()
