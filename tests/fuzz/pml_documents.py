"""Random PML: documents of its grammar, with and without faults, and mutations of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

_MAX_DEPTH = 5
_NEWLINE = "\n"
_FAULT_RATES = (0.0, 0.0, 0.0, 0.003, 0.03, 0.3)
_ROLES = ("system", "user", "assistant")
_NAMES = ("book.py", "_", "é", "模块", "a-b_c.9", "A", "\uff41", "a.b.c")
_WRONG_NAMES = (
    "", "1st", "-a", ".", "a b", "a:b", "user", "module", "schema", "xmlns", "a", "a", "²",
    "a&#10;", "x" * 255, "x" * 256, "\u0300", "a\n", "&lt;", "&quot;",
)  # fmt: skip
_TEXTS = (
    "word", " ", "\n", "\n    ", "\t", "\r\n", "\r", "&amp;", "&lt;", "&gt;", "&quot;", "&#10;",
    "&#x4E2D;", "&#13;", "中", "😀", "\u00a0", "\u2028", "<![CDATA[a < b && <user>]]>",
    "<!-- c -->", "<![CDATA[]]>", "<!-- <module> -->", "<?pi a>b?>", "]]&gt;", "<|im_end|>",
    "'", '"', "/>", "=",
)  # fmt: skip
_WRONG_TEXTS = (
    "&", "<", "]]>", "&x;", "&#0;", "&#xD800;", "&#99999999999;", "\x00", "\x1f", "\ufffe",
    "\ud800", "<!--", "-->", "--", "<![CDATA[", "<?", "?>", "<?xml version='1.0'?>", "<!DOCTYPE a>",
    "<>", "</", "<!ENTITY a 'b'>", "<a:b/>", "<x xmlns='u'/>", "</schema>", "</module>",
    "\ufeff", "&#x110000;",
)  # fmt: skip
_VALUES = ("", "3", "a b", "&amp;", "&lt;b&gt;", "&#10;", "&#9;", "中😀", "=", ">", "/>", "&quot;")
_WRONG_VALUES = ("a\nb", "\t", "a\r\nb", "<", "&", "&x;", "\x01", "\ud800", "&#0;")
_LENGTHS = ("1", "5", "10", "1000", "1000000")
_WRONG_LENGTHS = ("0", "-1", "abc", "", "1.5", "1e3", " 1", "٣", "1000001", "9" * 30, "9" * 5_000)
_SOURCES = ("a.txt", "inner/b.txt", "empty")
_WRONG_SOURCES = (
    "", "..", "../a.txt", "/etc/passwd", "inner", "link", "absent", "latin", "a\\b", "inner//b.txt",
    "a.txt/", "./a.txt", "inner/../a.txt", "x" * 5_000, "&#10;", "a\nb",
)  # fmt: skip
_WRONG_TAGS = ("modul", "b", "prompt", "schema", "x" * 300, "import", "xi", "include", "Module")
_ATTRIBUTES = (
    "name", "len", "length", "scaffold", "default", "pad", "cache", "src", "schema", "xml:space",
    "xml:lang", "x:y", "id", "xmlns", "xmlns:a",
)  # fmt: skip


class Grammar:
    """Documents of PML.

    Args:
        rng: Where every choice comes from.

    At each choice a fault slips in, with a probability drawn once a document and often 0.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._fault_rate = rng.choice(_FAULT_RATES)
        self._num_names = 0
        self._has_files = rng.random() < 0.3

    def document(self) -> str:
        """A schema or a prompt, perhaps behind a declaration and comments."""
        head = self._rng.choice(
            ("", "", "", '<?xml version="1.0"?>', "<!-- c -->\n", "\ufeff", "\n")
        )
        if self._fault():
            head += self._rng.choice(_WRONG_TEXTS)
        if self._rng.random() < 0.6:
            content = self._content(0, in_role=False, is_cached=True)
            return head + self._element("schema", {"name": "s"}, content)
        arguments = self._arguments()
        content = self._prompt_content(0, in_role=False)
        return head + self._element("prompt", {"schema": "s"} | arguments, content)

    def _fault(self) -> bool:
        return self._rng.random() < self._fault_rate

    def _one(self, right: tuple[str, ...], wrong: tuple[str, ...]) -> str:
        return self._rng.choice(wrong if self._fault() else right)

    def _name(self) -> str:
        self._num_names += 1
        if self._fault():
            return self._rng.choice(_WRONG_NAMES)
        return f"{self._rng.choice(_NAMES)}{self._num_names}"

    def _text(self) -> str:
        return "".join(self._one(_TEXTS, _WRONG_TEXTS) for _ in range(self._rng.randrange(4)))

    def _element(self, tag: str, attributes: dict[str, str], content: str) -> str:
        rng = self._rng
        if self._fault():
            attributes = attributes | {rng.choice(_ATTRIBUTES): self._one(_VALUES, _WRONG_VALUES)}
        if attributes and self._fault():
            attributes = {name: attributes[name] for name in list(attributes)[1:]}
        if rng.random() < 0.1:
            attributes = attributes | {"xml:space": rng.choice(("preserve", "default"))}
        pieces = [f"<{tag}"]
        for name, value in rng.sample(sorted(attributes.items()), len(attributes)):
            quote = '"' if "'" in value or rng.random() < 0.5 else "'"
            around = "" if rng.random() < 0.9 else rng.choice((" ", "\n", "\t"))
            pieces.append(f"{rng.choice('  ' if rng.random() < 0.9 else chr(10))}{name}{around}")
            pieces.append(f"={around}{quote}{value}{quote}")
            if self._fault():
                pieces.append(f"{name}='again'")
        if not content and rng.random() < 0.7:
            return "".join(pieces) + "/>"
        end = rng.choice(_WRONG_TAGS) if self._fault() else tag
        return f"{''.join(pieces)}>{content}</{end}>"

    def _content(
        self, depth: int, *, in_role: bool, is_cached: bool, in_scaffold: bool = False
    ) -> str:
        rng = self._rng
        kinds = ["text", "text", "param"]
        if depth < _MAX_DEPTH:
            kinds += [] if in_role else ["role"]
            kinds += [] if in_scaffold else ["module", "module", "union"]
            kinds += [] if in_scaffold or not is_cached else ["scaffold"]
        if self._fault():
            kinds = ["text", "param", "role", "module", "union", "scaffold", "unknown"]
        pieces = []
        for _ in range(rng.randrange(5 - depth // 2)):
            kind = rng.choice(kinds)
            if kind == "text":
                pieces.append(self._text())
            elif kind == "param":
                pieces.append(self._parameter())
            elif kind in ("module", "unknown"):
                tag = "module" if kind == "module" else rng.choice(_WRONG_TAGS)
                pieces.append(self._module(depth, tag, in_role=in_role, is_cached=is_cached))
            elif kind == "role":
                inner = self._content(
                    depth + 1, in_role=True, is_cached=is_cached, in_scaffold=in_scaffold
                )
                pieces.append(self._element(rng.choice(_ROLES), {}, inner))
            else:
                pieces.append(self._group(kind, depth, in_role=in_role, is_cached=is_cached))
        return "".join(pieces)

    def _module(
        self, depth: int, tag: str, *, in_role: bool, is_cached: bool, in_scaffold: bool = False
    ) -> str:
        rng = self._rng
        attributes = {"name": self._name()}
        if rng.random() < 0.2 or self._fault():
            uncached = not in_scaffold and (not is_cached or rng.random() < 0.5)
            attributes["cache"] = "false" if uncached else "true"
            is_cached = is_cached and not uncached
        if self._fault():
            attributes["cache"] = rng.choice(("true", "false", "no", ""))
        if (self._has_files and rng.random() < 0.2) or self._fault():
            content = self._text() if self._fault() else ""
            attributes["src"] = self._one(_SOURCES, _WRONG_SOURCES)
        else:
            content = self._content(
                depth + 1, in_role=in_role, is_cached=is_cached, in_scaffold=in_scaffold
            )
        return self._element(tag, attributes, content)

    def _group(self, tag: str, depth: int, *, in_role: bool, is_cached: bool) -> str:
        rng = self._rng
        in_scaffold = tag == "scaffold"
        num_members = rng.randrange(5) if self._fault() else rng.randrange(1 + in_scaffold, 4)
        first_name = self._num_names
        members = [
            self._module(
                depth + 1, "module", in_role=in_role, is_cached=is_cached, in_scaffold=in_scaffold
            )
            for _ in range(num_members)
        ]
        if self._fault():
            members.append(rng.choice((self._text(), self._parameter(), "<user/>", "x")))
        attributes = {"name": f"s{first_name}"} if in_scaffold else {}
        if not in_scaffold and self._fault():
            attributes["scaffold"] = self._name()
        elif not in_scaffold and rng.random() < 0.2:
            attributes["scaffold"] = "default"
            members.append('<module name="default">x</module>')
        return self._element(tag, attributes, rng.choice(("", " ", "\n  ")).join(members))

    def _parameter(self) -> str:
        rng = self._rng
        attributes = {"name": self._name()}
        attributes[rng.choice(("len", "length"))] = self._one(_LENGTHS, _WRONG_LENGTHS)
        if self._fault():
            attributes["len"] = rng.choice(_LENGTHS)
        for name in ("scaffold", "default"):
            if rng.random() < 0.3:
                attributes[name] = self._one(_VALUES, _WRONG_VALUES)
        if rng.random() < 0.3:
            attributes["pad"] = self._one(("none", "space"), _VALUES)
        content = self._text() if self._fault() else ""
        return self._element(rng.choice(("param", "parameter")), attributes, content)

    def _arguments(self) -> dict[str, str]:
        if self._rng.random() < 0.6:
            return {}
        return {
            self._one(("days", "city", "é"), _ATTRIBUTES): self._one(_VALUES, _WRONG_VALUES)
            for _ in range(self._rng.randrange(1, 3))
        }

    def _prompt_content(self, depth: int, *, in_role: bool) -> str:
        rng = self._rng
        pieces = []
        for _ in range(rng.randrange(4)):
            drawn = rng.random()
            if depth >= _MAX_DEPTH or drawn < 0.4:
                pieces.append(self._text())
            elif drawn < 0.6 and (not in_role or self._fault()):
                inner = self._prompt_content(depth + 1, in_role=True)
                pieces.append(self._element(rng.choice(_ROLES), {}, inner))
            else:
                name = self._one(_NAMES, _WRONG_TAGS)
                inner = self._prompt_content(depth + 1, in_role=in_role)
                pieces.append(self._element(name, self._arguments(), inner))
        return "".join(pieces)


def mutated(rng: Random, document: str) -> str:
    """A document with a few characters or pieces changed, put in, taken out or repeated."""
    pieces = (*_TEXTS, *_WRONG_TEXTS, *_WRONG_VALUES, *_ATTRIBUTES, *_WRONG_NAMES[:16], "</user>")
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(document) + 1)
        length = rng.choice((0, 0, 1, 1, 5, 20))
        other = rng.randrange(len(document) + 1)
        middle = rng.choice(
            (rng.choice(pieces), chr(rng.randrange(0x250)), "", document[other : other + 40])
        )
        document = document[:place] + middle + document[place + length :]
    return document


def encoded(rng: Random, document: str) -> bytes:
    """A document as bytes, in one of many encodings, which it declares or not, perhaps damaged."""
    codec = rng.choice(("utf-8", "utf-8", "utf-8", "utf-16", "utf-8-sig", "latin-1", "utf-32"))
    if rng.random() < 0.3 and not document.startswith(("<?", "\ufeff")):
        declared = rng.choice((codec, "UTF-8", "ISO-8859-1", "us-ascii", "utf-7", "x"))
        document = f'<?xml version="1.0" encoding="{declared}"?>{document}'
    errors = "replace" if codec == "latin-1" else "surrogatepass"
    content = bytearray(document.encode(codec, errors))
    if content and rng.random() < 0.5:
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def pieced(rng: Random) -> str:
    """Tags and texts in no order."""
    open_tags = [
        f"<{tag} name='a' len='1'>" for tag in ("schema", "module", "param", "scaffold", "a")
    ]
    tags = ("schema", "module", "union", "user", "system", "prompt", "a", "scaffold", "param")
    pieces = (
        "<schema name='s'>", "<prompt schema='s'>", *open_tags,
        *(f"<{tag}>" for tag in tags), *(f"</{tag}>" for tag in tags),
        *(f"<{tag}/>" for tag in tags),
        *_TEXTS, *_WRONG_TEXTS,
    )  # fmt: skip
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 25)))


def bomb(rng: Random) -> str:
    """A document that would grow, nest or repeat far beyond its rules."""
    size = rng.choice((100, 1_000, 5_000))
    name = rng.choice(("m", "m" * 200))
    attributes = " ".join(f"a{i}='x'" for i in range(size))
    union = "<union><module name='a'/></union>"
    doctype = f"<!DOCTYPE s [<!ENTITY a '{'&b;' * size}'>]>"
    return rng.choice(
        (
            f"<schema name='s'>{f'<module name={name!r}>' * size}",
            f"<prompt schema='s'>{'<a>' * size}{'</a>' * size}</prompt>",
            f"<prompt schema='s' {attributes}/>",
            f"<schema name='{'x' * size}'>{'&amp;' * size}</schema>",
            f"<schema name='s'>{'<!-- c -->x' * size}</schema>",
            f"<schema name='s'>{f'<param name={name!r} len={name!r}/>' * size}</schema>",
            f"<schema name='s'><{'b' * size}/></schema>",
            f"{doctype}<schema name='s'>&a;</schema>",
            f"<schema name='s'><module name='a'{_NEWLINE * size}src='{'a/' * size}'/></schema>",
            f"<schema name='s'>{'<![CDATA[x]]>' * size}{_NEWLINE * size}</schema>",
            f"<schema name='s'>{union * size}</schema>",
        )
    )


def random_document(rng: Random) -> str | bytes:
    """One input: half of them follow the grammar, the others are mutated, pieced or huge."""
    drawn = rng.random()
    if drawn < 0.002:
        return bomb(rng)
    if drawn < 0.05:
        return pieced(rng)
    document = Grammar(rng).document()
    if drawn < 0.55:
        return document
    if drawn < 0.85:
        document = mutated(rng, document)
    return document if drawn < 0.75 else encoded(rng, document)
