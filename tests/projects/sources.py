"""Files of other repositories, at fixed commits, and what they define.

    python -m tests.projects.sources    # fetches all of them into `FETCHED`

Without network, `PROJECTS_DIR` names a folder with clones: `OWNER/NAME`, `NAME` or `OWNER+NAME`, bare or not.
"""

import ast
import hashlib
import importlib.util
import os
import subprocess
import sys
import types
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

FETCHED = Path(__file__).parents[2] / ".venv-projects" / "sources"


class Source(NamedTuple):
    """A file of a repository on GitHub."""

    repository: str
    commit: str
    path: str
    sha256: str

    @property
    def fetched(self) -> Path:
        return FETCHED / self.repository / self.commit / self.path


LIGHTNING = ("Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414")
TUTORIALS = ("Lightning-AI/tutorials", "15817658a2d63afa338b9e1cd8454fb98d746fac")
TRANSFORMER = Source(
    *LIGHTNING,
    "examples/pytorch/basics/transformer.py",
    "417e7ceb2e0611d7656ea6ea72927c18a04dcf4fda824e3baca2645a9e464367",
)
VIT = Source(
    *TUTORIALS,
    "course_UvA-DL/11-vision-transformer/VT.py",
    "e6d224d52e38dcbaeabfc9453a332f285720c318ca6243df57b3a9c9fa434a83",
)
GLUE = Source(
    *TUTORIALS,
    "lightning_examples/text-transformers/notebook.py",
    "ae0aff64d784d14b6fb6c13d746515e64cd2a9df8d993261f7d5488088a39d1d",
)


def fetch(source: Source) -> None:
    """Write the file to `source.fetched`, from `PROJECTS_DIR` or GitHub, unless it is there.

    Raises:
        OSError: If it cannot be had, or is not what it was.
    """
    if source.fetched.exists():
        return
    folder = os.environ.get("PROJECTS_DIR")
    text = _from_clone(Path(folder), source) if folder else _from_network(source)
    if hashlib.sha256(text).hexdigest() != source.sha256:
        raise OSError(f"{source.path} of {source.repository} is not the file that was tested")
    source.fetched.parent.mkdir(parents=True, exist_ok=True)
    temporary = source.fetched.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(text)
    os.replace(temporary, source.fetched)


def _from_network(source: Source) -> bytes:
    url = f"https://raw.githubusercontent.com/{source.repository}/{source.commit}/{source.path}"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.read()
    except urllib.error.URLError as error:
        raise OSError(f"{url} cannot be fetched ({error.reason}); set PROJECTS_DIR to a folder with clones") from error


def _from_clone(folder: Path, source: Source) -> bytes:
    owner, name = source.repository.split("/")
    places = [folder / owner / name, folder / name, folder / f"{owner}+{name}" / "repo", folder / f"{owner}+{name}"]
    for place in filter(Path.is_dir, places):
        shown = subprocess.run(["git", "-C", place, "show", f"{source.commit}:{source.path}"], capture_output=True)
        if shown.returncode == 0:
            return shown.stdout
    raise OSError(f"PROJECTS_DIR={folder} has no clone of {source.repository} with commit {source.commit[:10]}")


def definitions(source: Source, name: str, **variables: Any) -> types.ModuleType:
    """Import what a script defines, and run nothing of it: downloads, drawings and training are left out.

    Args:
        source: The script, fetched.
        name: How the module is to be called.
        variables: Global names that its functions read, and that the script's own statements would set.
    """
    tree = ast.parse(source.fetched.read_text())
    defines = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    tree.body = [node for node in tree.body if isinstance(node, defines) and not _is_missing(node)]
    module = types.ModuleType(name)
    module.__file__ = str(source.fetched)
    vars(module).update(variables)
    sys.modules[name] = module
    exec(compile(tree, source.fetched, "exec"), vars(module))
    return module


def _is_missing(node: ast.stmt) -> bool:
    """Tell whether this imports a package that is not installed: those for drawings and images are not needed."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    roots = [name.partition(".")[0] for name in names]
    return any(root not in sys.modules and importlib.util.find_spec(root) is None for root in roots)


if __name__ == "__main__":
    for each in (TRANSFORMER, VIT, GLUE):
        try:
            fetch(each)
        except OSError as error:
            print(f"{error}; its project will be skipped")
