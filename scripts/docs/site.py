"""The generated pages of the documentation site, as a hook of mkdocs (see mkdocs.yml).

    reference/api/*.md      public names by package, with mkdocstrings
    reference/recipe.md     every key of a recipe, from the config's schema
    reference/commands.md   every command with its options, from the command line
    reference/laws.md       every law of the audit, from its declaration
    adr/index.md            the decision records
    changelog.md            the changelog

A block that the reader saves as a file (``<!-- test: file NAME -->``) gets its name as a title.

Nothing is written into docs/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, content in {**api(), **{name: make() for name, make in PAGES.items()}}.items():
        files.append(File.generated(config, name, content=content))
    return files


SAVED = re.compile(r"(<!-- test: file (\S+) -->\n(?:<!-- test: [^\n]*\n)*```\w+)\n")


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    if page.file.src_uri == "which-bug.md":
        markdown = re.sub(r"(?<!\[)`([A-Z0-9-]+)`", _linked_law, markdown)
    return SAVED.sub(r'\1 title="\2"\n', markdown)


def _linked_law(found: re.Match[str]) -> str:
    """The code of a law with a link to its section of reference/laws.md; any other text as it is."""
    from earnest_audit.frontends.pages import ALL

    names = {law.code: slugify(f"{law.code}: {law.name}", "-") for law in ALL}
    code = found[1]
    return f"[`{code}`](reference/laws.md#{names[code]})" if code in names else found[0]


def api() -> dict[str, str]:
    """Public names of ``earnest``: a page for each package that defines some, and one with links."""
    import earnest

    groups: dict[str, list[str]] = {}
    names: list[str] = vars(earnest)["__all__"]
    for name in names:
        found = getattr(earnest, name)
        package = found.__module__.split(".")[1]
        groups.setdefault(package, []).append(f"{found.__module__}.{found.__qualname__}")
    pages = {}
    lines = ["# API\n\nEvery name is one of `earnest`: `import earnest as en`, then `en.NAME`.\n"]
    for package, names in sorted(groups.items()):
        names.sort(key=lambda name: name.rpartition(".")[2].lower())
        parts = [f"# earnest.{package}\n", *(f"::: {name}\n" for name in names)]
        pages[f"reference/api/{package}.md"] = "\n".join(parts)
        links = ", ".join(f"[`{n.rpartition('.')[2]}`](api/{package}.md#{n})" for n in names)
        lines.append(f"- [**{package}**](api/{package}.md): {links}")
    return {"reference/api.md": "\n".join(lines) + "\n", **pages}


def recipe() -> str:
    """A table of keys for the recipe and for each of its sections."""
    from earnest.config import RunConfig

    schema = RunConfig.model_json_schema()
    parts = [
        "# Recipe keys\n\nA recipe is a YAML file; `earnest run RECIPE key=value` overrides a key, "
        "`a.b=value` one of a section.\n"
    ]
    top = {key: field for key, field in schema["properties"].items() if not _section(field)}
    parts.append(_keys("The recipe", "", top, schema.get("required", ())))
    for key, field in schema["properties"].items():
        section = _section(field)
        if section:
            inner = schema["$defs"][section]
            parts.append(_keys(f"`{key}`", f"{key}.", inner.get("properties", {}), inner.get("required", ())))
    return "\n".join(parts)


def _section(field: Mapping[str, Any]) -> str | None:
    for option in (field, *field.get("anyOf", ()), *field.get("allOf", ())):
        if "$ref" in option:
            return str(option["$ref"]).rsplit("/", 1)[-1]
    return None


def _keys(title: str, prefix: str, fields: Mapping[str, Any], required: Any) -> str:
    lines = [f"## {title}\n", "| key | values | default | what it does |", "|---|---|---|---|"]
    for key, field in fields.items():
        default = "required" if key in required else f"`{_plain(field.get('default'))}`"
        cells = (f"`{prefix}{key}`", _values(field), default, field.get("description", ""))
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _plain(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _values(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{_plain(v)}`" for v in field["enum"])
    if "const" in field:
        return f"`{_plain(field['const'])}`"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_values(option) for option in field["anyOf"]))
    if "$ref" in field:
        return "a section"
    if field.get("type") == "array":
        return f"list of {_values(field.get('items', {})) or 'values'}"
    bounds = [
        f"{sign} {field[key]:g}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in field and abs(field[key]) < 2**31
    ]
    names = {
        "string": "text",
        "integer": "whole number",
        "object": "mapping",
        "boolean": "`true`, `false`",
        "null": "`null`",
    }
    kind = names.get(str(field.get("type", "")), str(field.get("type", "")))
    return " ".join([kind, ", ".join(bounds)]).strip()


def commands() -> str:
    """Every command: its sentence, arguments and options."""
    import typer

    from earnest.cli import app

    parts = [
        "# Commands\n\nExit codes: 0 done · 1 a law fails, or a run had to stop "
        "· 2 a mistake in the command or its settings · 130 Ctrl-C.\n"
    ]
    _command(parts, "earnest", typer.main.get_command(app))
    return "\n".join(parts)


def _command(parts: list[str], name: str, command: Any) -> None:
    inner = getattr(command, "commands", None)
    if inner is not None:
        for key in sorted(inner):
            if not inner[key].hidden:
                _command(parts, f"{name} {key}", inner[key])
        return
    words = [_label(p) for p in command.params if p.param_type_name == "argument"]
    parts.append(f"## {name}\n\n```text\n{name} {' '.join(words)}\n```\n\n{_paragraphs(command.help or '')}\n")
    rows = []
    for p in command.params:
        if p.name == "help" or getattr(p, "hidden", False):
            continue
        label = _label(p)
        default = "" if p.default in (None, False, ()) or p.required or callable(p.default) else f"`{p.default}`"
        rows.append(f"| `{label}` | {_cell(getattr(p, 'help', None) or '')} | {default} |")
    if rows:
        parts += ["| argument or option | what it does | default |", "|---|---|---|", *rows, ""]


def _label(parameter: Any) -> str:
    if parameter.param_type_name != "argument":
        return ", ".join((*parameter.opts, *parameter.secondary_opts))
    name = parameter.metavar or str(parameter.name).upper()
    return name if parameter.required else f"[{name}]"


def _paragraphs(text: str) -> str:
    return re.sub(r"[ \t]+\n", "\n", text.replace("\b", "").strip())


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("|", "\\|"))


def laws() -> str:
    """A section for each law, from its own file."""
    from earnest_audit.frontends.pages import pages

    return f"# Laws of the audit\n\n[The audit](../audit.md) explains how to declare a step.\n\n{pages()}\n"


def changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text()


def decisions() -> str:
    """Links to the decision records, with their titles."""
    lines = ["# Decisions\n"]
    for path in sorted((ROOT / "docs/adr").glob("0*.md")):
        title = path.read_text().partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


PAGES = {
    "adr/index.md": decisions,
    "reference/recipe.md": recipe,
    "reference/commands.md": commands,
    "reference/laws.md": laws,
    "changelog.md": changelog,
}
