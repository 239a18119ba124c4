"""English of the README, the site, and the messages of a run: the rule is in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import lightning_parallel

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONGEST = 30

PATTERNS = {
    "a clause as a noun": r"\bwhat (?:is|was|it|a|the|they|you|one|has|of|no|all|each)\b|\bthose (?:that|who)\b",
    "a person for software": r"(?<!the ones )\bwho \b(?!wrote|maintain)|\bsomeone\b|\bsomebody\b|\bnobody\b",
    "no word of today": r"\bshall\b|\binside of\b|\boutside of\b|\bfor ever\b|\bas ever\b|\bbut for\b",
    "as it stands": r"\bas they are\b|\bas it is\b|\b, too,",
    "a private word": r"\bfullest rank\b|\bthe proof\b|\bdivided (?:layer|model|parameter|tensor|weight|over|logits)",
}

# Messages only: internal names and some pages still have these words.
MESSAGE_PATTERNS = {
    "an old word": r"\b(?:un)?cut (?:at|elsewhere|in|into|layers|model|the)\b|\bdivided\b|\bverified on\b|\bwhole:"
    r"|\bwhole (?:again|batch|model|module|parameter|sequence|tensor)|\b(?:is|are|it|layers|stays?) whole\b",
    "an old grammar": r"\b[Ee]xpected\b.*\b(?:got|found)\b|, (?:got|found)\b|\. Expected\b",
}

# Where a pattern is right: (part of the sentence, reason).
ALLOWED: list[tuple[str, str]] = []


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page or a message; tables count by cell, code and links by one word."""
    text = re.sub(r"^```.*?^```|<!--.*?-->|<[^>\n]+>", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r" ?\[LP\d{3}\]", "", text)
    text = re.sub(r"`[^`\n]*`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*#|-]|\d+\.) ?)|\|", text):
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z(*\"'])", " ".join(block.split())):
            if sentence.strip(" *#-|"):
                yield sentence.strip()


def faults(text: str) -> Iterator[str]:
    """Yield each sentence that breaks the rule, with the reason."""
    for sentence in sentences(text):
        if any(part in sentence for part, _ in ALLOWED):
            continue
        for reason, pattern in PATTERNS.items():
            if found := re.search(pattern, sentence, re.IGNORECASE):
                yield f"{reason} (`{found[0].strip()}`): {sentence}"
        if len(sentence.split()) > LONGEST:
            yield f"{len(sentence.split())} words: {sentence}"


def messages() -> Iterator[tuple[str, str]]:
    """Yield the texts that a run shows: of errors, warnings and lines, with their place."""
    shown = {"warn", "rank_zero_warn", "rank_zero_info", "rank_zero_print", "print", "raise_together", "add_argument"}
    for path in sorted((ROOT / "lightning_parallel").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(called, ast.Call):
                continue
            name = called.func.attr if isinstance(called.func, ast.Attribute) else getattr(called.func, "id", "")
            if isinstance(node, ast.Raise) or name in shown:
                for argument in (*called.args, *(k.value for k in called.keywords if k.arg == "help")):
                    if len((text := _text(argument)).split()) > 5:
                        yield f"{path.relative_to(ROOT)}:{called.lineno}", text


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield all strings of a module but docstrings, with their place: messages are often put together elsewhere."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    inner |= {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant | ast.JoinedStr) or id(node) in inner:
            continue
        if len((text := _text(node)).split()) > 2:
            yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of public names and of their own public members, without code, with their place."""
    for name in lightning_parallel.__all__:
        value = getattr(lightning_parallel, name)
        members = vars(value).items() if inspect.isclass(value) else ()
        found = {name: value, **{f"{name}.{key}": member for key, member in members if not key.startswith("_")}}
        for place, documented in found.items():
            if (
                inspect.isclass(documented)
                or inspect.isroutine(documented)
                or isinstance(documented, (property, classmethod, staticmethod))
            ):
                yield place, prose(documented.__doc__ or "")


def prose(docstring: str) -> str:
    """Return a docstring without its code: blocks between fences, and paragraphs of indented lines only."""
    text = re.sub(r"^ *```.*?^ *```$", "", inspect.cleandoc(docstring), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?:(?<=\n\n)|\A)(?: {4}.*(?:\n|\Z))+(?=\n|\Z)", "", text)


def _text(node: ast.AST, value: str = "X") -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, value) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_text(node.left, value) or value) + (_text(node.right, value) or value)
    return ""


def test_pages_keep_the_rule():
    found = [f"{page.relative_to(ROOT)}: {fault}" for page in PAGES for fault in faults(page.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_docstrings_of_public_names_keep_the_rule():
    found = [f"{place}: {fault}" for place, text in docstrings() for fault in faults(text)]
    assert not found, "\n".join(found)


def test_docstrings_of_public_names_keep_to_the_words_of_the_field():
    found = [
        f"{place}: {reason} (`{match[0]}`): {sentence}"
        for place, text in docstrings()
        for sentence in sentences(text)
        for reason, pattern in MESSAGE_PATTERNS.items()
        if (match := re.search(pattern, sentence))
    ]
    assert not found, "\n".join(found)


def test_prose_of_a_docstring_has_no_code_and_all_sentences():
    docstring = """Measures.

    `report()` returns:

        ranks: [{rank}]

    Example:
        ```py
        trainer = Trainer()

        trainer.fit()
        ```

    Args:
        steps: Number of steps.
            More.
    """
    text = prose(docstring)
    assert not [code for code in ("{rank}", "Trainer", "fit()") if code in text]
    assert not [part for part in ("Measures.", "returns:", "Number of steps.", "More.") if part not in text]
    assert len(dict(docstrings())) > len(lightning_parallel.__all__), "members have docstrings, too"


def test_messages_keep_the_rule():
    found = [f"{place}: {fault}" for place, text in messages() for fault in faults(text)]
    assert not found, "\n".join(found)


def test_texts_of_the_package_keep_to_the_words_of_the_field():
    found = [
        f"{place}: {reason} (`{match[0]}`): {text}"
        for path in sorted((ROOT / "lightning_parallel").rglob("*.py"))
        for place, text in texts(path)
        for reason, pattern in MESSAGE_PATTERNS.items()
        if (match := re.search(pattern, text))
    ]
    assert not found, "\n".join(found)


# ------------------------------------------------------------------------------------------------- codes of messages

_VALUE = "\0"


def coded() -> Iterator[tuple[str, str, str]]:
    """Yield code, file and text of each message that has a code; values in it are `_VALUE`."""
    for path in sorted((ROOT / "lightning_parallel").rglob("*.py")):
        todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
        while todo:
            node = todo.pop()
            text = _text(node, _VALUE) if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)) else ""
            if found := re.findall(r"\[(LP\d{3})\]", text):
                for code in found:
                    yield code, str(path.relative_to(ROOT)), re.sub(r"\{\d*(?::[^{}]*)?\}", _VALUE, text)
            else:
                todo.extend(ast.iter_child_nodes(node))


def test_each_code_has_a_section_that_quotes_its_message():
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    sections = re.findall(r'<a id="(lp\d{3})"></a>\n\n### (LP\d{3}): .*\n\n```text\n((?s:.*?))\n```', page)
    messages_of: dict[str, list[str]] = {}
    for code, _, text in coded():
        messages_of.setdefault(code, []).append(text)
    codes = [code for _, code, _ in sections]
    assert sorted(codes) == sorted(messages_of), "each code of the package has one section, and each section a code"
    assert re.findall(r"^\| \[(LP\d{3})\]\(#lp\d{3}\) \|", page, re.MULTILINE) == codes
    for anchor, code, quoted in sections:
        assert anchor == code.lower()
        quote = " ".join(quoted.split())
        patterns = [
            r"\s*".join(".*" if part == _VALUE else re.escape(part) for part in re.split(f"({_VALUE})| ", text) if part)
            for text in (" ".join(text.split()) for text in messages_of[code])
        ]
        texts = "\n".join(messages_of[code]).replace(_VALUE, "...")
        assert any(re.search(rf"{p}$", quote) for p in patterns), f"{code} on the page:\n{quote}\nin the code:\n{texts}"
