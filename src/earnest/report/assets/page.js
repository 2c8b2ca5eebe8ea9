// Draws every chart of the page by hand, and keeps one cursor for all of them. Loads nothing.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const plots = [];
  let cursor = null; // a step, or null

  // ── numbers ────────────────────────────────────────────────────────────────────────────────────────────────────
  const minus = (text) => text.replaceAll("-", "−");
  function format(value) {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e7 || size < 1e-4) {
      const [mantissa, exponent] = value.toExponential(2).split("e");
      return minus(Number(mantissa) + "e" + Number(exponent));
    }
    if (Number.isInteger(value)) return minus(value.toLocaleString("en-US"));
    return minus(Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 8 }));
  }
  function axis(marks) {
    // Marks of one axis with the same decimals, as many as tell them apart.
    const step = marks.length > 1 ? Math.abs(marks[1] - marks[0]) : 0;
    const decimals = step ? Math.max(0, -Math.floor(Math.log10(step * 1.0001))) : 0;
    if (!step || decimals > 6 || step >= 1e6) return marks.map(format);
    return marks.map((mark) => minus(mark.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals })));
  }
  const percent = (value) => Math.round(100 * value) + " %";

  function ticks(low, high, most, whole) {
    // Round numbers, about `most` of them and never fewer than two where there are two.
    for (let tries = most; ; tries++) {
      const raw = (high - low) / tries;
      const power = 10 ** Math.floor(Math.log10(raw));
      let step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
      if (whole) step = Math.max(1, Math.round(step));
      const found = [];
      for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
      if (found.length > 1 || tries > most + 8) return found;
    }
  }

  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  // ── drawing ────────────────────────────────────────────────────────────────────────────────────────────────────
  function svg(tag, attributes, parent, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const name in attributes) node.setAttribute(name, attributes[name]);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }
  const hue = (series) => (series.colour < 0 ? "sn" : "s" + (series.colour % 6));
  const fix = (value) => value.toFixed(1);

  function stacked(series) {
    const base = series[0].x.map(() => 0);
    return series.map((one) => {
      const lo = base.slice();
      one.y.forEach((value, i) => { base[i] += value; });
      return { ...one, lo, hi: base.slice(), value: one.y };
    });
  }

  function extent(chart, series) {
    let low = chart.floor ?? Infinity, high = chart.ceiling ?? -Infinity;
    for (const one of series) for (const list of [one.y, one.lo, one.hi]) for (const value of list) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (chart.share) return [0, 1];
    if (low === high) { const room = Math.abs(low) * 0.1 || 1; return [low - room, high + room]; }
    const room = (high - low) * 0.06;
    return [low === chart.floor ? low : low - room, high === chart.ceiling ? high : high + room];
  }

  function spread(labels, top, bottom, gap) {
    labels.sort((a, b) => a.y - b.y);
    labels.forEach((label, i) => { label.y = Math.max(label.y, i ? labels[i - 1].y + gap : top); });
    for (let i = labels.length - 1; i >= 0; i--) labels[i].y = Math.min(labels[i].y, i < labels.length - 1 ? labels[i + 1].y - gap : bottom);
  }

  function draw(plot) {
    const { box, chart, large } = plot;
    const width = box.clientWidth;
    if (!width) return;
    const height = !large ? 118 : chart.share ? 170 : Math.round(Math.min(320, Math.max(210, width * 0.34)));
    const series = chart.share ? stacked(chart.series) : chart.series;
    const [low, high] = extent(chart, series);
    const yTicks = chart.share ? [0, 0.5, 1] : ticks(low, high, large ? 5 : 3, false);
    const write = chart.share ? percent : format;
    const direct = large ? series.filter((one) => one.style !== "faint") : []; // a faint series comes with its mean
    const cut = (text) => (text.length > 16 ? text.slice(0, 15) + "…" : text);
    const yNames = chart.share ? yTicks.map(percent) : axis(yTicks);
    const left = 8 + 6.6 * Math.max(...yNames.map((name) => name.length));
    const right = direct.length ? 14 + 7 * Math.max(...direct.map((one) => cut(one.label).length)) : 10;
    const top = 8, bottom = height - 22;
    const all = series.flatMap((one) => [one.x[0], one.x[one.x.length - 1]]);
    let first = Math.min(...all), last = Math.max(...all);
    if (first === last) { first -= 1; last += 1; }
    const px = (x) => left + ((x - first) / (last - first)) * (width - left - right);
    const py = (y) => bottom - ((y - low) / (high - low)) * (bottom - top);
    const line = (xs, ys) => xs.map((x, i) => (i ? "L" : "M") + fix(px(x)) + "," + fix(py(ys[i]))).join("");
    const ring = (one) => line(one.x, one.hi) + line(one.x.slice().reverse(), one.lo.slice().reverse()).replace("M", "L") + "Z";

    box.replaceChildren();
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true", focusable: "false" }, box);
    yTicks.forEach((t, i) => {
      svg("line", { class: "gridline", x1: left, x2: width - right, y1: fix(py(t)), y2: fix(py(t)) }, root);
      svg("text", { x: left - 7, y: fix(py(t) + 4), "text-anchor": "end" }, root, yNames[i]);
    });
    svg("line", { class: "axis", x1: left, x2: width - right, y1: bottom, y2: bottom }, root);
    const xTicks = ticks(Math.ceil(first), Math.floor(last), Math.max(3, Math.floor((width - left - right) / 110)), true);
    xTicks.forEach((t, i) => {
      const text = (i === 0 ? "step " : "") + format(t);
      const at = px(t), anchor = at < left + 18 ? "start" : at > width - 16 ? "end" : "middle";
      svg("text", { x: fix(anchor === "start" ? Math.max(at - 4, left) : at), y: height - 6, "text-anchor": anchor }, root, text);
    });

    for (const one of series) {
      const group = svg("g", { class: hue(one) }, root);
      const single = one.x.length === 1;
      if (one.style === "area") {
        const whole = single ? { x: [first, last], lo: [one.lo[0], one.lo[0]], hi: [one.hi[0], one.hi[0]] } : one;
        svg("path", { class: "stack", d: ring(whole) }, group);
        if (one !== series[series.length - 1]) svg("path", { class: "curve thin", d: line(one.x, one.hi) }, group);
      } else if (one.style === "bars") {
        svg("path", { class: "curve thin", d: line(one.x, one.y) }, group);
        one.x.forEach((x, i) => {
          const at = fix(px(x)), cap = one.x.length > 60 ? 0 : 3;
          const ends = [one.lo[i], one.hi[i]].map((end) => `M${fix(px(x) - cap)},${fix(py(end))}h${2 * cap}`).join("");
          svg("path", { class: "whisker", d: `M${at},${fix(py(one.lo[i]))}V${fix(py(one.hi[i]))}${ends}` }, group);
          svg("circle", { class: "dot bare", cx: at, cy: fix(py(one.y[i])), r: one.x.length > 60 ? 1.6 : 2.8 }, group);
        });
      } else {
        const again = one.style === "line" && series.some((other) => other.style === "faint");
        if (one.lo.length && !again) svg("path", { class: "band", d: ring(one) }, group);
        svg("path", { class: one.style === "faint" ? "curve faint" : "curve", d: line(one.x, one.y) }, group);
      }
      if (single && one.style !== "bars" && one.style !== "area") svg("circle", { class: "dot", cx: fix(px(one.x[0])), cy: fix(py(one.y[0])), r: 3.6 }, group);
    }

    const labels = direct.map((one) => {
      const end = one.x.length - 1;
      const at = one.style === "area" ? (one.lo[end] + one.hi[end]) / 2 : one.y[end];
      return { one, y: py(at) + 4 };
    });
    spread(labels, top + 6, bottom + 2, 15);
    for (const { one, y } of labels) svg("text", { class: "direct hue " + hue(one), x: width - right + 9, y: fix(y) }, root, cut(one.label));

    plot.marks = svg("g", {}, root);
    Object.assign(plot, { series, px, py, top, bottom, write, first, last, span: [left, width - right] });
    mark(plot);
  }

  // ── the cursor ─────────────────────────────────────────────────────────────────────────────────────────────────
  function reading(plot, x) {
    // One entry a series: its value at the point nearest to the cursor, and that point's step where it is another one.
    return plot.series.filter((one) => one.style !== "faint").map((one) => {
      const i = nearest(one.x, x);
      const value = one.value ? one.value[i] : one.y[i];
      const spreadText = one.style === "bars" ? " ± " + format(Number(((one.hi[i] - one.lo[i]) / 2).toPrecision(2))) : "";
      const other = one.style === "bars" && Math.round(one.x[i]) !== Math.round(x) ? ` (step ${format(Math.round(one.x[i]))})` : "";
      const label = plot.series.length > 1 ? one.label + " " : "";
      return { label, text: plot.write(value) + spreadText, other, i, one };
    });
  }

  function mark(plot) {
    const last = plot.axis[plot.axis.length - 1];
    const at = cursor === null ? last : Math.min(Math.max(cursor, plot.axis[0]), last);
    const x = plot.axis[nearest(plot.axis, at)];
    const values = reading(plot, x);
    const say = `step ${format(Math.round(x))}: ` + values.map((v) => v.label + v.text + v.other).join(", ");
    plot.readout.replaceChildren();
    if (cursor !== null) plot.readout.append(`step ${format(Math.round(x))}\u2003`);
    if (cursor !== null || plot.series.length === 1) values.forEach((v, i) => {
      if (i) plot.readout.append("\u2003");
      const bold = document.createElement("b");
      bold.textContent = v.text;
      plot.readout.append(v.label, bold, v.other);
    });
    plot.box.setAttribute("aria-valuenow", Math.round(x));
    plot.box.setAttribute("aria-valuetext", say);
    plot.marks.replaceChildren();
    if (cursor === null) return;
    svg("line", { class: "cross", x1: fix(plot.px(x)), x2: fix(plot.px(x)), y1: plot.top, y2: plot.bottom }, plot.marks);
    for (const { one, i } of values) {
      if (one.style === "area") continue;
      svg("circle", { class: "dot " + hue(one), cx: fix(plot.px(one.x[i])), cy: fix(plot.py(one.y[i])), r: 4 }, plot.marks);
    }
  }

  function point(x) {
    cursor = x;
    for (const plot of plots) if (plot.marks) mark(plot);
  }

  function listen(plot) {
    const { box, axis } = plot;
    const toStep = (event) => {
      const [left, right] = plot.span;
      const share = (event.clientX - box.getBoundingClientRect().left - left) / (right - left);
      point(axis[nearest(axis, plot.first + share * (plot.last - plot.first))]);
    };
    box.addEventListener("pointermove", toStep);
    box.addEventListener("pointerdown", toStep);
    box.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") point(null); });
    box.addEventListener("blur", () => point(null));
    box.addEventListener("keydown", (event) => {
      const here = cursor === null ? axis.length - 1 : nearest(axis, cursor);
      const far = Math.max(1, Math.round(axis.length / 10));
      const to = { ArrowLeft: here - 1, ArrowRight: here + 1, ArrowDown: here - 1, ArrowUp: here + 1, PageDown: here - far, PageUp: here + far, Home: 0, End: axis.length - 1 }[event.key];
      if (event.key === "Escape") point(null);
      else if (to !== undefined) point(axis[Math.min(axis.length - 1, Math.max(0, to))]);
      else return;
      event.preventDefault();
    });
  }

  for (const box of document.querySelectorAll("[data-chart]")) {
    const chart = charts[box.dataset.chart];
    const figure = box.closest("figure");
    const longest = chart.series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    const axis = [...new Set(longest.x.concat(chart.series.some((one) => one.style === "bars") ? chart.series.flatMap((one) => (one.style === "bars" ? one.x : [])) : []))].sort((a, b) => a - b);
    const plot = { box, chart, axis, large: figure.classList.contains("large"), readout: figure.querySelector(".readout") };
    for (const [name, value] of Object.entries({ role: "slider", tabindex: 0, "aria-label": chart.title + ", by step", "aria-valuemin": Math.round(axis[0]), "aria-valuemax": Math.round(axis[axis.length - 1]) })) box.setAttribute(name, value);
    plots.push(plot);
    draw(plot);
    listen(plot);
  }
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    plots.forEach(draw);
  }).observe(document.body);

  // ── the theme and the filter of samples ────────────────────────────────────────────────────────────────────────
  const theme = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  const kept = (value) => { // file:// may forbid storage: then the choice lasts as long as the page
    try { return value === undefined ? localStorage.getItem("earnest-theme") : localStorage.setItem("earnest-theme", value); } catch { return null; }
  };
  function dress(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    theme.textContent = "theme: " + name;
  }
  let current = themes.includes(kept()) ? kept() : "auto";
  dress(current);
  theme.hidden = false;
  theme.addEventListener("click", () => {
    current = themes[(themes.indexOf(current) + 1) % themes.length];
    kept(current);
    dress(current);
  });

  const filter = document.querySelector(".filter");
  if (filter) {
    filter.hidden = false;
    filter.addEventListener("click", (event) => {
      const chosen = event.target.closest("button");
      if (!chosen) return;
      for (const button of filter.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button === chosen));
      for (const pair of document.querySelectorAll(".pairs > [data-kind]")) {
        pair.hidden = chosen.dataset.show !== "all" && pair.dataset.kind !== chosen.dataset.show;
      }
    });
  }
})();
