"""The page's sections, each a function of the run. Nothing here chooses among samples or hides a failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from earnest.report import curves
from earnest.report.curves import Chart
from earnest.report.markup import Child, Html, duration, el, fixed, join, number, signed
from earnest.report.record import Finding, Outcome, Run, TermValue


def section(key: str, title: str, *children: Child) -> Html:
    return el("section", el("h2", title, id=f"{key}-title"), *children, id=key, aria_labelledby=f"{key}-title")


def headline(run: Run) -> Html:
    """Task, model, held-out before → after ± s.e., and the facts that a reader asks for first."""
    header, change = run.header, run.change
    model = f"{header.model} {header.model_version}".strip()
    title = el("h1", header.task, el("span", " on ", class_="soft"), model)
    kicker = el("p", "earnest run", el("span", " · ", class_="soft"), header.recipe, class_="kicker")
    if change is not None:
        spread = f"{change.before.prompts} prompts, {change.before.n} completions"
        if (change.before.prompts, change.before.n) != (change.after.prompts, change.after.n):
            spread = f"{spread} before; {change.after.prompts} prompts, {change.after.n} completions after"
        result: Html | None = el(
            "div",
            el(
                "p",
                _measure("before", "before", change.before.reward, change.before.se),
                el("span", "→", class_="arrow", aria_label="to"),
                _measure(
                    "after", "after" if header.status == "finished" else "so far", change.after.reward, change.after.se
                ),
                class_="figures",
            ),
            el(
                "p",
                "Held-out reward, ",
                el("b", signed(change.gain)),
                f" ± {fixed(change.se)} " if change.se is not None else " ",
                el(
                    "span",
                    f"from step {change.before.step} to step {change.after.step}; {spread}; ± 1 s.e., ",
                    class_="soft",
                ),
                el("span", "combined as if the two were independent", class_="soft"),
                class_="caption",
            ),
            class_="result",
        )
    else:
        result = el("p", "No before and after yet.", class_="result soft")
    facts = [
        ("status", _badge(header.status, "good" if header.status == "finished" else "warn")),
        ("verdict", _verdict_badge(run)),
        ("seed", str(header.seed)),
        (
            "steps",
            f"{header.steps_done}" if header.steps_done == header.steps else f"{header.steps_done} of {header.steps}",
        ),
        ("training time", duration(header.seconds)),
        ("adapter", header.adapter or "none: all weights"),
        ("objective", header.objective),
        ("started", header.started.replace("T", " ").replace("Z", " UTC")),
    ]
    listed = el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in facts), class_="facts")
    return el("header", kicker, title, result, listed, class_="headline")


def _measure(kind: str, name: str, value: float | None, se: float | None) -> Html:
    spread = el("span", f" ± {fixed(se)}", class_="se") if se is not None else None
    return el(
        "span",
        el("span", name, class_="tag"),
        el("span", fixed(value), class_="value"),
        spread,
        class_=f"measure {kind}",
    )


def _badge(text: str, tone: str) -> Html:
    return el("span", text, class_=f"badge {tone}")


def _verdict_badge(run: Run) -> Html:
    found = run.verdict.findings if run.verdict is not None else ()
    return _tally(found) if found else _badge("not checked", "warn")


TONES: dict[Outcome, str] = {"holds": "good", "fails": "bad", "not declared": "warn", "not applicable": "quiet"}


def _tally(findings: Sequence[Finding]) -> Html:
    """How many hold; how many fail comes first where any does."""
    count = {outcome: sum(finding.outcome == outcome for finding in findings) for outcome in TONES}
    if count["fails"]:
        return _badge(f"{count['fails']} of {len(findings)} fail", "bad")
    if count["not declared"]:
        return _badge(f"{count['holds']} hold, {count['not declared']} not declared", "warn")
    if count["holds"]:
        return _badge(f"{count['holds']} hold" if count["holds"] > 1 else "holds", "good")
    return _badge("not applicable", "quiet")


def notices(run: Run) -> Html | None:
    """Broken laws, what is missing, and every warning and error, at the top where nobody can miss them."""
    loud = [event for event in run.events if event.level != "info"]
    broken = [finding for finding in run.verdict.findings if finding.outcome == "fails"] if run.verdict else []
    items = [
        *(el("li", el("b", "broken"), f": {f.law} on {f.subject}. {f.meaning}", class_="bad") for f in broken),
        *(el("li", gap) for gap in run.gaps),
        *(el("li", el("b", event.level), f": {event.text}") for event in loud),
    ]
    if not items:
        return None
    return el("aside", el("h2", "Worth knowing"), el("ul", *items), class_="notices", aria_label="Worth knowing")


def figure(chart: Chart, large: bool = False) -> Html:
    """Title and readout, the place where the script draws, and the same numbers as a table."""
    return el(
        "figure",
        el("figcaption", el("span", chart.title, class_="name"), el("span", class_="readout", aria_hidden="true")),
        el("div", class_="plot", data_chart=chart.key),
        el("p", chart.note, class_="note") if chart.note else None,
        _data(chart),
        class_="large" if large else "small",
    )


def _data(chart: Chart) -> Html:
    head = el("tr", *(el("th", name, scope="col") for name in chart.table.columns))
    rows = (
        el("tr", el("th", number(row[0]), scope="row"), *(el("td", number(v)) for v in row[1:]))
        for row in chart.table.rows
    )
    label = f"{chart.title}, as a table"
    grid = el("table", el("thead", head), el("tbody", *rows), class_="numbers")
    return el(
        "details",
        el("summary", "table", aria_label=label),
        el("div", grid, class_="scroll", tabindex=0, role="region", aria_label=label),
        el("p", chart.table.note, class_="note") if chart.table.note else None,
        class_="data",
    )


def reward(run: Run) -> tuple[Html, list[Chart]]:
    chart = curves.reward_chart(run)
    if chart is None:
        return section("reward", "Reward", none("No reward is recorded.")), []
    return section("reward", "Reward", figure(chart, large=True)), [chart]


def terms(run: Run) -> tuple[Html, list[Chart]]:
    """What each term was worth and what really ran for it."""
    if not run.steps:
        return section("terms", "Terms of the loss", none("No step is recorded.")), []
    labels = curves.term_labels(run)
    rows = (_term_row(run, label, colour) for colour, label in enumerate(labels))
    names = ("term", "weight", "what ran", "loss, first", "loss, last", "share of the gradient")
    head = el("thead", el("tr", *(el("th", name, scope="col") for name in names)))
    grid = el(
        "div",
        el("table", head, el("tbody", *rows), class_="terms"),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label="Terms",
    )
    skipped = sorted({label for step in run.steps for label in step.skipped})
    left = el("p", f"Weight 0, so not computed: {', '.join(skipped)}.", class_="note") if skipped else None
    passes = ", ".join(dict.fromkeys(step.passes for step in run.steps))
    ran = el("p", f"Passes over the batch: {passes}.", class_="note")
    share = curves.share_chart(run)
    losses = curves.loss_charts(run)
    drawn = [*([share] if share else []), *losses]
    return (
        section(
            "terms", "Terms of the loss", grid, left, ran, figure(share, large=True) if share else None, _grid(losses)
        ),
        drawn,
    )


def _term_row(run: Run, label: str, colour: int) -> Html:
    values: list[TermValue] = [step.terms[label] for step in run.steps if label in step.terms]
    shares = [value.share for value in values if value.share is not None]
    weights = sorted({value.weight for value in values})
    weight = number(weights[0]) if len(weights) == 1 else f"{number(weights[0])} to {number(weights[-1])}"
    ran = list(dict.fromkeys(value.ran for value in values))
    share = f"{100 * sum(shares) / len(shares):.0f} %" if shares else "not measured"
    return el(
        "tr",
        el("th", el("span", class_=f"key c{colour % 6}", aria_hidden="true"), label, scope="row"),
        el("td", weight),
        el("td", *(el("code", one) for one in ran), class_="ran"),
        el("td", number(values[0].value)),
        el("td", number(values[-1].value)),
        el("td", share),
    )


def _grid(charts: Sequence[Chart]) -> Html | None:
    return el("div", *(figure(chart) for chart in charts), class_="grid") if charts else None


def update(run: Run) -> tuple[Html | None, list[Chart]]:
    """Gradient and update norm, clip fraction, and every other number that moved."""
    charts, constant = curves.metric_charts(run)
    if not charts and not constant:
        return None, []
    still = ", ".join(f"{name} {number(value)}" for name, value in constant)
    note = el("p", f"Never changed: {still}.", class_="note") if still else None
    return section("update", "The update", _grid(charts), note), charts


def verdict(run: Run) -> Html:
    """Failures first and with what they mean; below, every finding law by law."""
    title = "Verdict"
    if run.verdict is None or not run.verdict.findings:
        return section("verdict", title, none("No verdict yet: the training step of this run has not been checked."))
    found = run.verdict.findings
    counts = ", ".join(
        f"{run.verdict.count(outcome)} {word}" for outcome, word in WORDS.items() if run.verdict.count(outcome)
    )
    when = (
        f", after step {run.verdict.step}"
        if run.verdict.step
        else ", before the first step"
        if run.verdict.step == 0
        else ""
    )
    took = f", in {duration(run.verdict.seconds)}" if run.verdict.seconds is not None else ""
    lead = el("p", f"The laws of a training step, checked on this run's own{when}{took}: {counts}.")
    failing = [finding for finding in found if finding.outcome == "fails"]
    broken = el("div", el("h3", "Broken"), _findings(failing, "Broken laws"), class_="broken") if failing else None
    laws = []
    for law in dict.fromkeys(finding.law for finding in found):
        own = [finding for finding in found if finding.law == law]
        summary = el("summary", el("span", law, class_="law"), _tally(own))
        laws.append(el("details", summary, _findings(own, law), class_="law", open=len(found) <= 12))
    return section("verdict", title, lead, broken, *laws)


WORDS: dict[Outcome, str] = {
    "holds": "hold",
    "fails": "fail",
    "not declared": "not declared",
    "not applicable": "not applicable",
}


def _findings(findings: Sequence[Finding], label: str) -> Html:
    rows: list[Html] = []
    for finding in findings:
        rows.append(
            el(
                "tr",
                el("th", finding.subject, scope="row"),
                el("td", finding.measured),
                el("td", finding.expected),
                el("td", _badge(finding.outcome, TONES[finding.outcome])),
            )
        )
        if finding.outcome != "holds" and finding.meaning:
            rows.append(el("tr", el("td", finding.meaning, colspan=4, class_="meaning")))
    head = el("tr", *(el("th", name, scope="col") for name in ("subject", "measured", "expected", "outcome")))
    grid = el("table", el("thead", head), el("tbody", *rows), class_="checks")
    return el("div", grid, class_="scroll", tabindex=0, role="region", aria_label=label)


def events(run: Run) -> Html | None:
    if not run.events:
        return None
    rows = (
        el("li", el("time", event.time), el("span", event.level, class_=f"level {event.level}"), event.text)
        for event in run.events
    )
    return section("events", "Events", el("ol", *rows, class_="events"))


def config(run: Run) -> Html:
    if run.config is None:
        return section("config", "Config", none("There is no config.yaml."))
    return section(
        "config",
        "Config",
        el("pre", el("code", run.config.rstrip()), class_="scroll", tabindex=0, aria_label="config.yaml"),
    )


def environment(run: Run) -> Html:
    if run.environment is None:
        return section("environment", "Environment", none("There is no environment.json."))
    return section("environment", "Environment", _map(run.environment))


def _map(data: Mapping[str, object]) -> Html:
    return el(
        "dl", *(el("div", el("dt", str(name)), el("dd", _value(value))) for name, value in data.items()), class_="map"
    )


def _value(value: object) -> Html:
    if isinstance(value, Mapping):
        return _map({str(name): inner for name, inner in value.items()})
    if isinstance(value, list):
        return join(", ".join(str(entry) for entry in value))
    plain = {None: "–", True: "yes", False: "no"}.get(value) if value is None or isinstance(value, bool) else None
    return join(plain if plain is not None else str(value))


def none(text: str) -> Html:
    return el("p", text, class_="none")
