"""The sections of the page: curves, terms, updates, events, settings. Each is a function of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from earnest.report import curves
from earnest.report.blocks import badge, none, note, row, section, table
from earnest.report.curves import Chart
from earnest.report.markup import Child, Html, el, join, number
from earnest.report.record import Run
from earnest.report.watch import FALLING, FALLING_IF, RunWatch

BRIEF = 80
"""Characters of a warning in the list of events; Worth knowing has the whole text."""


def figure(chart: Chart, large: bool = False) -> Html:
    """A chart's title, its current values, the area that the script draws in, and the numbers as a table."""
    label = f"{chart.title}, as a table"
    grid = table(label, chart.table.columns, (row(*map(number, values)) for values in chart.table.rows), "numbers")
    return el(
        "figure",
        el("figcaption", el("span", chart.title, class_="name"), el("span", class_="readout", aria_hidden="true")),
        el("div", class_="plot", data_chart=chart.key),
        note(chart.note),
        el("details", el("summary", "table", aria_label=label), grid, note(chart.table.note), class_="data"),
        class_="large" if large else "small",
    )


def reward(run: Run) -> tuple[Html, list[Chart]]:
    chart = curves.reward_chart(run)
    if chart is None:
        return section("reward", "Reward", none("No reward is recorded.")), []
    title = "Reward" if run.measure == "reward" else "Held-out rows"
    further = curves.evaluation_charts(run)
    return section("reward", title, figure(chart, large=True), _further(run), figures(further)), [chart, *further]


def _further(run: Run) -> Html | None:
    """The other numbers of the evaluations, before and after, with standard errors where they are known."""
    change = run.change
    if change is None:
        return None
    names = [name for name in change.after.metrics if not name.endswith("_se") and name in change.before.metrics]
    if not names:
        return None

    def cell(metrics: Mapping[str, float | None], name: str) -> str:
        se = metrics.get(f"{name}_se")
        return number(metrics[name]) + ("" if se is None else f" ± {number(se, 2)}")

    rows = (row(name, cell(change.before.metrics, name), cell(change.after.metrics, name)) for name in names)
    columns = ("number", f"step {change.before.step:,}", f"step {change.after.step:,}")
    label = "All numbers of the evaluations"
    return el("details", el("summary", label), table(label, columns, rows, "numbers"), class_="data")


def terms(run: Run) -> tuple[Html, list[Chart]]:
    """Each term's weight, loss and share of the gradient, and the code that computed it."""
    title = "Terms of the loss"
    if not run.steps:
        return section("terms", title, none("No step is recorded.")), []
    names = ("term", "weight", "what ran", "loss, first", "loss, last", "share of the gradient")
    rows = (_term_row(run, label, colour) for colour, label in enumerate(curves.term_labels(run)))
    grid = table(title, names, rows, "terms")
    share, losses = curves.share_chart(run), curves.loss_charts(run)
    shown = figure(share, large=True) if share else None
    return section("terms", title, grid, *_ran(run), shown, figures(losses)), [*([share] if share else []), *losses]


def _term_row(run: Run, label: str, colour: int) -> Html:
    values = [step.terms[label] for step in run.steps if label in step.terms]
    shares = [value.share for value in values if value.share is not None]
    weights = sorted({value.weight for value in values})
    weight = number(weights[0]) if len(weights) == 1 else f"{number(weights[0])} to {number(weights[-1])}"
    ran = dict.fromkeys(value.ran for value in values)
    return el(
        "tr",
        el("th", el("span", class_=f"key c{colour % 6}", aria_hidden="true"), label, scope="row"),
        el("td", weight),
        el("td", *(el("code", one) for one in ran), class_="ran"),
        el("td", "surrogate" if values[0].surrogate else number(values[0].loss)),
        el("td", "surrogate" if values[-1].surrogate else number(values[-1].loss)),
        el("td", f"{100 * sum(shares) / len(shares):.0f} %" if shares else "not measured"),
    )


def _ran(run: Run) -> list[Html | None]:
    """The sentences under the table of terms: terms that did not run, and the engine's passes over the batch."""
    skipped = sorted({label for step in run.steps for label in step.skipped})
    idle: dict[tuple[str, str], int] = {}
    for step in run.steps:
        for entry in step.idle.items():
            idle[entry] = idle.get(entry, 0) + 1
    passes = dict.fromkeys(step.passes for step in run.steps if step.passes)
    return [
        note(f"Weight 0, so not computed: {', '.join(skipped)}." if skipped else ""),
        *(
            note(f"{label} had nothing to do on {count:,} of {len(run.steps):,} steps: {why}")
            for (label, why), count in idle.items()
        ),
        note(f"Passes over the batch: {', '.join(passes)}." if passes else ""),
    ]


def figures(charts: Sequence[Chart]) -> Html | None:
    """Small charts side by side; None without a chart."""
    return el("div", *(figure(chart) for chart in charts), class_="grid") if charts else None


def update(run: Run) -> tuple[Html | None, list[Chart]]:
    """Gradient and update norm, clip fraction, and every other number that changed."""
    charts, still = curves.metric_charts(run)
    if not charts and not still:
        return None, []
    never = ", ".join(f"{one.title} {number(one.value)}" for one in still if one.exact)
    hardly = ", ".join(f"{one.title} {number(one.value)}" for one in still if not one.exact)
    notes = [
        note(f"Never changed: {never}." if never else ""),
        note(f"Changed by less than {number(curves.UNCHANGED_BELOW)} of their size: {hardly}." if hardly else ""),
    ]
    return section("update", "The update", figures(charts), *notes), charts


def watch(run: Run) -> Html | None:
    """Each condition of the watch: of how many steps or evaluations it was true, and at which steps it warned."""
    if not run.steps:
        return None
    found = RunWatch.of(run)
    rows = []
    for streak in found.streaks:
        seen = f"{streak.count} of {len(streak.shown)} steps, at most {streak.longest} in a row"
        shown = seen if streak.count else "no step"
        rows.append(_condition(streak.condition.name, streak.condition.true_if, shown, streak.warned))
    worse = f"{len(found.worse)} of {len(run.evaluations)} evaluations" if found.worse else "no evaluation"
    rows.append(_condition(FALLING, FALLING_IF, worse, found.warned_worse))
    grid = table("Watch", ("condition", "true if", "true of", "warned at"), rows, "checks")
    logged = {event.text for event in run.events}  # these stand under Worth knowing, in full
    missing = [text for text in found.warnings if text not in logged]
    told = el("ul", *(el("li", text) for text in missing)) if missing else None
    lead = "Conditions under which a run trains in vain or gets worse; each warns after several steps in a row."
    return section("watch", "Watch", el("p", lead), told, grid)


def _condition(name: str, true_if: str, seen: str, warned: Sequence[int]) -> Html:
    steps = "step " + ", ".join(f"{step:,}" for step in warned)
    return row(name, true_if, seen, badge(steps, "warn") if warned else badge("never", "good"))


def events(run: Run) -> Html | None:
    if not run.events:
        return None
    rows = []
    for event in run.events:
        said: tuple[Child, ...] = (event.text,)
        if event.level != "info" and len(event.text) > BRIEF:
            said = (f"{event.text[:BRIEF].rpartition(' ')[0]} … ", el("a", "in full", href="#notices"))
        level = el("span", event.level, class_=f"level {event.level}")
        rows.append(el("li", el("time", event.time), level, *said))
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


_SAMPLERS = {
    "trainer/idle": "share of the time that the trainer waited",
    "sampler/idle": "share of the time that samplers waited",
    "sampler/age": "age of the tokens in versions, mean",
    "sampler/age_max": "age of the tokens in versions, largest of a step",
    "sampler/continued": "share of completions that continued under new weights",
    "sampler/queue": "batches that were ready when the trainer asked",
    "sampler/again": "parts that were sampled more than once, so far",
    "sampler/restarts": "samplers that were started again, so far",
}

_COLUMNS = ("per step", "mean", "smallest", "largest")


def samplers(run: Run) -> Html | None:
    """What an asynchronous run gained and cost: waiting, the age of what was trained, and the ratios. None for a
    run that samples and trains in turns."""
    if not any("sampler/age" in step.metrics for step in run.steps):
        return None
    rows = [
        _spread(text, [v for s in run.steps if (v := s.metrics.get(name)) is not None], share="share" in text)
        for name, text in _SAMPLERS.items()
    ]
    for metric, text in (("ratio", "ratio to the weights that sampled, mean"), ("ratio_max", "largest ratio")):
        values = [v for s in run.steps for t in s.terms.values() if (v := t.metrics.get(metric)) is not None]
        rows.append(_spread(text, values))
    lead = (
        f"Samplers worked while the trainer trained, so a step was trained on tokens of older weights. {_gain(run)} "
        "The ratios compare the trained weights with those that sampled: the further they are from 1, the more the "
        "older tokens cost."
    )
    return section("samplers", "Samplers", el("p", lead), table("Samplers", _COLUMNS, rows))


def _gain(run: Run) -> str:
    """How much longer the same work takes in turns. A step counts by its seconds."""
    steps = [s for s in run.steps if s.metrics.get("trainer/idle") is not None]
    spans = [sum(v or 0.0 for v in s.seconds.values()) for s in steps]
    total = sum(spans)
    if not total:
        return "No times were recorded."
    trained, sampled = (
        sum(span * (1 - (s.metrics.get(name) or 0.0)) for s, span in zip(steps, spans, strict=True)) / total
        for name in ("trainer/idle", "sampler/idle")
    )
    worked = f"The trainer worked {trained:.0%} of the time and the mean sampler {sampled:.0%}"
    if trained + sampled <= 1:
        return f"{worked}, so no time was gained."
    return f"{worked}; one after the other, the same work would take {trained + sampled:.2f} times as long."


def _spread(text: str, values: Sequence[float], *, share: bool = False) -> Html | None:
    if not values:
        return None
    shown = (sum(values) / len(values), min(values), max(values))
    return row(text, *(f"{value:.1%}" if share else number(value, 3) for value in shown))
