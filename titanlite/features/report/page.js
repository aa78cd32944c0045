// Draws the plots of a report into its figures, at their real width: text stays crisp on a phone and on paper.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const COLORS = 8;
  // Nine samples of viridis, as in TensorBoard's picture of the expert load.
  const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129],
    [92, 200, 99], [170, 220, 50], [253, 231, 37]];

  function svg(name, attributes, ...children) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  function html(name, attributes, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  // --- numbers

  function format(value) {
    if (value === null || !Number.isFinite(value)) return "not finite";
    const size = Math.abs(value);
    if (size === 0) return "0";
    for (const [unit, scale] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e4]]) {
      if (size >= scale) return trim(value / (unit === "k" ? 1e3 : scale)) + unit;
    }
    return size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : trim(value);
  }

  function trim(value) {
    return String(Number(value.toPrecision(4)));
  }

  // Round numbers that enclose nothing but lie in [low, high]: multiples of 1, 2 or 5 times a power of ten.
  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(count, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
    return found;
  }

  function logTicks(low, high) {
    const found = [];
    const decades = Math.log10(high / low);
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
      for (const m of decades > 4 ? [1] : decades > 1.5 ? [1, 3] : decades > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 5, 7]) {
        const value = m * 10 ** e;
        if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
      }
    }
    return found;
  }

  // The index of the value of sorted `xs` that is nearest to x.
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  function colorOf(position) {
    const t = Math.min(Math.max(position, 0), 1) * (VIRIDIS.length - 1);
    const i = Math.min(Math.floor(t), VIRIDIS.length - 2);
    return VIRIDIS[i].map((c, k) => Math.round(c + (VIRIDIS[i + 1][k] - c) * (t - i)));
  }

  // --- frame: axes, grid, and the tooltip that follows pointer and arrow keys

  function scaleOf(low, high, start, length, log) {
    if (log) [low, high] = [Math.log(low), Math.log(high)];
    const width = high - low || 1;
    const scale = (value) => start + ((log ? Math.log(value) : value) - low) / width * length;
    scale.invert = (pixel) => (log ? Math.exp : (v) => v)(low + (pixel - start) / length * width);
    return scale;
  }

  function describe(chart) {
    const parts = chart.series.filter((s) => s.style !== "faint").slice(0, 4).map((s) => {
      const ys = s.y.filter((y) => y !== null);
      return ys.length ? `${s.name}: ${format(ys[0])} to ${format(ys[ys.length - 1])}` : `${s.name}: no finite value`;
    });
    return parts.join("; ");
  }

  function frame(box, chart, x, y, height) {
    const width = Math.max(box.clientWidth, 240);
    const yTicks = y.ticks;
    const left = 14 + 7 * Math.max(...yTicks.map((t) => (y.label || format)(t).length), x.title ? x.title.length : 1);
    const inner = {left, top: 8, width: width - left - 14, height: height - 38};
    const root = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0,
      "aria-label": `${chart.title}. ${describe(chart)}`});
    const xs = scaleOf(x.low, x.high, inner.left, inner.width, false);
    const ys = scaleOf(y.high, y.low, inner.top, inner.height, y.log);
    const grid = svg("g", {class: "grid"});
    for (const value of yTicks) {
      const at = Math.round(ys(value)) + 0.5;
      grid.append(svg("line", {x1: inner.left, x2: inner.left + inner.width, y1: at, y2: at}));
      grid.append(svg("text", {x: inner.left - 6, y: at + 4, "text-anchor": "end"}, (y.label || format)(value)));
    }
    for (const value of x.ticks(Math.max(2, Math.floor(inner.width / 90)))) {
      const at = xs(value);
      const anchor = at > inner.left + inner.width - 12 ? "end" : at < inner.left + 12 ? "start" : "middle";
      grid.append(svg("text", {x: at, y: height - 8, "text-anchor": anchor}, x.label ? x.label(value) : format(value)));
    }
    if (x.title) grid.append(svg("text", {x: inner.left - 6, y: height - 8, "text-anchor": "end"}, x.title));
    root.append(grid);
    return {root, xs, ys, inner, width, height};
  }

  function follow(box, f, stops, show) {
    const tip = html("div", {class: "tip", hidden: ""});
    const hair = svg("line", {class: "hair", y1: f.inner.top, y2: f.inner.top + f.inner.height, visibility: "hidden"});
    f.root.append(hair);
    box.append(tip);
    let current = -1;
    const place = (index) => {
      current = Math.min(Math.max(index, 0), stops.length - 1);
      const at = f.xs(stops[current]);
      hair.setAttribute("x1", at);
      hair.setAttribute("x2", at);
      hair.setAttribute("visibility", "visible");
      tip.replaceChildren(...show(stops[current], current));
      tip.hidden = false;
      const room = f.width - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(0, Math.min(at + 12 > room ? at - tip.offsetWidth - 12 : at + 12, room))}px`;
      tip.style.top = `${f.inner.top + 4}px`;
    };
    const hide = () => {
      tip.hidden = true;
      hair.setAttribute("visibility", "hidden");
    };
    f.root.addEventListener("pointermove", (event) => {
      place(nearest(stops, f.xs.invert(event.clientX - f.root.getBoundingClientRect().left)));
    });
    f.root.addEventListener("pointerleave", hide);
    f.root.addEventListener("blur", hide);
    f.root.addEventListener("keydown", (event) => {
      const last = stops.length - 1, fresh = current < 0;
      const to = {ArrowLeft: fresh ? last : current - 1, ArrowRight: current + 1, Home: 0, End: last}[event.key];
      if (to === undefined) return;
      event.preventDefault();
      place(to);
    });
  }

  function row(color, name, value) {
    return html("div", {class: color === null ? "" : `c${color % COLORS}`},
      ...(color === null ? [] : [html("i", {})]), `${name} `, html("b", {}, value));
  }

  function legend(figure, chart, hidden, redraw) {
    const named = chart.series.filter((s) => s.style !== "faint");
    if (named.length < 2) return;
    const box = html("div", {class: "legend"});
    chart.series.forEach((s, i) => {
      if (s.style === "faint") return;
      const button = html("button", {type: "button", class: `c${colorIndex(chart, i) % COLORS}`,
        "aria-pressed": !hidden.has(s.name)}, html("i", {}), s.name);
      button.addEventListener("click", () => {
        if (hidden.has(s.name)) hidden.delete(s.name); else hidden.add(s.name);
        redraw();
      });
      box.append(button);
    });
    figure.append(box);
  }

  function colorIndex(chart, index) {
    const color = chart.series[index].color;
    return color === undefined ? index : color;
  }

  // --- kinds of plots; each returns the number of points that it drew

  function drawLines(box, chart, hidden) {
    const shown = chart.series.map((s, i) => ({...s, color: colorIndex(chart, i)}))
      .filter((s) => !hidden.has(s.name) && !(s.style === "faint" && hidden.has(`${s.name}, smoothed`)));
    const values = shown.flatMap((s) => s.y).filter((y) => y !== null && (!chart.log || y > 0));
    const all = shown.flatMap((s) => s.x);
    if (!values.length) return 0;
    let [low, high] = bounds(values);
    const log = chart.log && low > 0 && high / low > 3;
    if (chart.zero && !log) [low, high] = [Math.min(0, low), Math.max(0, high)];
    if (!log) {
      const pad = (high - low || Math.abs(high) || 1) * 0.05;
      [low, high] = [chart.zero && low >= 0 ? low : low - pad, high + pad];
    } else {
      [low, high] = [low / 1.15, high * 1.15];
    }
    const f = frame(box, chart, steps(...bounds(all)), {low, high, log, ticks: log ? logTicks(low, high) : ticks(low, high, 5)}, 250);
    let points = 0;
    for (const s of shown) {
      let path = "", pen = false;
      const dots = svg("g", {class: `dots c${s.color % COLORS}`});
      s.x.forEach((x, i) => {
        const y = s.y[i];
        if (y === null || (log && y <= 0)) {
          pen = false;
          return;
        }
        path += `${pen ? "L" : "M"}${f.xs(x).toFixed(1)} ${f.ys(y).toFixed(1)}`;
        pen = true;
        points++;
        if (s.style === "points" || s.x.length === 1) dots.append(svg("circle", {cx: f.xs(x), cy: f.ys(y), r: 3.2}));
      });
      f.root.append(svg("path", {class: `line ${s.style || ""} c${s.color % COLORS}`, d: path}), dots);
    }
    box.append(f.root);
    const stops = [...new Set(all)].sort((a, b) => a - b);
    const reach = (stops[stops.length - 1] - stops[0]) / 60;
    follow(box, f, stops, (x) => [html("div", {class: "at"}, `step ${x.toLocaleString("en")}`), ...shown.flatMap((s) => {
      const i = nearest(s.x, x);
      return Math.abs(s.x[i] - x) <= reach || s.style !== "points" ? [row(s.color, s.name, format(s.y[i]))] : [];
    })]);
    return points;
  }

  function drawStack(box, chart, hidden) {
    const shown = chart.series.map((s, i) => ({...s, color: i})).filter((s) => !hidden.has(s.name));
    if (!shown.length) return 0;
    const xs = shown[0].x;
    const base = xs.map(() => 0);
    const layers = shown.map((s) => ({...s, from: [...base], to: s.y.map((y, i) => (base[i] += y || 0))}));
    const high = Math.max(...base) * 1.04 || 1;
    const f = frame(box, chart, steps(...bounds(xs)), {low: 0, high, ticks: ticks(0, high, 5)}, 250);
    for (const s of layers) {
      const upper = xs.map((x, i) => `${f.xs(x).toFixed(1)} ${f.ys(s.to[i]).toFixed(1)}`);
      const lower = xs.map((x, i) => `${f.xs(x).toFixed(1)} ${f.ys(s.from[i]).toFixed(1)}`).reverse();
      f.root.append(svg("path", {class: `area c${s.color % COLORS}`, d: `M${upper.join("L")}L${lower.join("L")}Z`}));
    }
    box.append(f.root);
    follow(box, f, xs, (x, i) => [html("div", {class: "at"}, `step ${x.toLocaleString("en")}`),
      ...[...layers].reverse().map((s) => row(s.color, s.name, `${format(s.y[i])} ${chart.unit}`)),
      row(null, "all", `${format(base[i])} ${chart.unit}`)]);
    return xs.length * layers.length;
  }

  function drawBars(box, chart, hidden) {
    const shown = chart.series.map((s, i) => ({...s, color: i})).filter((s) => !hidden.has(s.name));
    if (!shown.length) return 0;
    const ranks = shown[0].x;
    const sums = ranks.map((_, i) => shown.reduce((sum, s) => sum + (s.y[i] || 0), 0));
    const high = Math.max(...sums) * 1.06 || 1;
    const x = {low: -0.5, high: ranks.length - 0.5, label: String, title: "rank",
      ticks: (count) => ticks(0, Math.max(ranks.length - 1, 1), Math.min(count, ranks.length)).filter((t) => Number.isInteger(t) && t < ranks.length)};
    const f = frame(box, chart, x, {low: 0, high, ticks: ticks(0, high, 5)}, 250);
    const wide = Math.max(1, Math.min(36, f.inner.width / ranks.length * 0.7));
    const base = ranks.map(() => 0);
    for (const s of shown) {
      ranks.forEach((rank, i) => {
        const bottom = f.ys(base[i]);
        base[i] += s.y[i] || 0;
        const top = f.ys(base[i]);
        f.root.append(svg("rect", {class: `bar c${s.color % COLORS}`, x: f.xs(rank) - wide / 2, y: top, width: wide,
          height: Math.max(bottom - top, 0)}));
      });
    }
    box.append(f.root);
    follow(box, f, ranks, (rank, i) => [html("div", {class: "at"}, `rank ${rank}`),
      ...shown.map((s) => row(s.color, s.name, `${format(s.y[i])} ${chart.unit}`)),
      row(null, "busy", `${format(sums[i])} ${chart.unit}`)]);
    return ranks.length * shown.length;
  }

  // A grid of cells as a picture of one pixel each, which the browser enlarges without smoothing.
  function picture(columns, rows, colorAt) {
    const canvas = html("canvas", {width: columns, height: rows});
    const context = canvas.getContext("2d");
    const image = context.createImageData(columns, rows);
    for (let r = 0; r < rows; r++) {
      for (let c = 0; c < columns; c++) image.data.set(colorAt(r, c), 4 * (r * columns + c));
    }
    context.putImageData(image, 0, 0);
    return canvas.toDataURL();
  }

  function drawGrid(box, chart, colorAt, labelAt, columnTicks, columnLabel, textAt, key) {
    const {columns, rows, first_row: first, layers} = chart.extra;
    const layer = (r) => String(layers.length ? layers[r] : r + first);
    const height = 42 + rows * Math.max(5, Math.min(22, Math.floor(300 / rows)));
    const f = frame(box, chart, {low: -0.5, high: columns - 0.5, ticks: columnTicks, label: columnLabel, title: key[2]},
      {low: rows - 0.5, high: -0.5, label: layer,
        ticks: ticks(0, Math.max(rows - 1, 1), Math.min(rows, 8)).filter((t) => Number.isInteger(t) && t < rows)}, height);
    const image = svg("image", {x: f.inner.left, y: f.inner.top, width: f.inner.width, height: f.inner.height,
      preserveAspectRatio: "none", class: "cells", href: picture(columns, rows, colorAt)});
    f.root.append(image);
    box.append(f.root);
    const strip = picture(64, 1, (_, c) => [...colorOf(c / 63), 255]);
    box.append(html("div", {class: "key"}, key[0], html("img", {src: strip, alt: ""}), key[1]));
    const tip = html("div", {class: "tip", hidden: ""});
    box.append(tip);
    f.root.addEventListener("pointermove", (event) => {
      const at = f.root.getBoundingClientRect();
      const c = Math.round(f.xs.invert(event.clientX - at.left)), r = Math.round(f.ys.invert(event.clientY - at.top));
      tip.hidden = !(c >= 0 && c < columns && r >= 0 && r < rows);
      if (tip.hidden) return;
      tip.replaceChildren(html("div", {class: "at"}, labelAt(c)), row(null, `layer ${layer(r)}`, textAt(r, c)));
      tip.style.left = `${Math.max(0, Math.min(f.xs(c) + 10, f.width - tip.offsetWidth - 4))}px`;
      tip.style.top = `${Math.max(0, f.ys(r) - tip.offsetHeight - 6)}px`;
    });
    f.root.addEventListener("pointerleave", () => { tip.hidden = true; });
    return columns * rows;
  }

  function drawHeat(box, chart) {
    const {columns, steps: at, values} = chart.extra;
    return drawGrid(box, chart,
      (r, c) => values[r][c] === null ? [128, 128, 128, 90] : [...colorOf(Math.log2(values[r][c]) / 2), 255],
      (c) => `step ${at[c].toLocaleString("en")}`,
      // Round steps, each at the column that is nearest to it.
      (count) => columns === 1 ? [0] : [...new Set(ticks(at[0], at[columns - 1], count).map((t) => nearest(at, t)))],
      (c) => format(at[c]), (r, c) => values[r][c] === null ? "no tokens" : `${format(values[r][c])} x`,
      ["1 x", "4 x and more", "step"]);
  }

  function drawExperts(box, chart, hidden, state) {
    const {columns, frames, range} = chart.extra;
    if (state.frame === undefined) state.frame = frames.length - 1;
    const bytes = Uint8Array.from(atob(frames[state.frame].cells), (c) => c.charCodeAt(0));
    const cell = (r, c) => bytes[r * columns + c];
    const log = (b) => ((b - 1) / 254 * 2 - 1) * range;
    const count = drawGrid(box, chart,
      (r, c) => cell(r, c) ? [...colorOf((log(cell(r, c)) + 2) / 4), 255] : [128, 128, 128, 90],
      (c) => `expert ${c}`, (n) => ticks(0, Math.max(columns - 1, 1), Math.min(n, columns)).filter(Number.isInteger), String,
      (r, c) => cell(r, c) ? `${trim(Number((2 ** log(cell(r, c))).toPrecision(2)))} x` : "no tokens",
      ["1/4 x and less", "4 x and more; grey: no tokens", "expert"]);
    return count;
  }

  function slider(figure, chart, state, redraw) {
    const {frames} = chart.extra;
    if (frames.length < 2) return;
    const label = html("output", {}, `step ${frames[state.frame].step.toLocaleString("en")}`);
    const input = html("input", {type: "range", min: 0, max: frames.length - 1, value: state.frame,
      "aria-label": "point of the run"});
    input.addEventListener("input", () => {
      state.frame = Number(input.value);
      label.textContent = `step ${frames[state.frame].step.toLocaleString("en")}`;
      redraw();
    });
    figure.append(html("div", {class: "slider"}, input, label));
  }

  function bounds(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return [low, high];
  }

  function steps(low, high) {
    if (low === high) [low, high] = [low - 1, high + 1];
    return {low, high, title: "step", ticks: (count) => ticks(low, high, count).filter(Number.isInteger)};
  }

  const DRAW = {line: drawLines, stack: drawStack, bars: drawBars, heat: drawHeat, experts: drawExperts};

  function draw(chart) {
    const figure = document.getElementById(`plot-${chart.name}`);
    const box = html("div", {class: "plot"});
    const controls = html("div", {});
    const hidden = new Set(), state = {};
    figure.append(box, controls);
    const paint = () => {
      box.replaceChildren();
      figure.dataset.points = DRAW[chart.kind](box, chart, hidden, state);
    };
    const all = () => {
      paint();
      controls.replaceChildren();
      legend(controls, chart, hidden, all);
    };
    all();
    if (chart.kind === "experts") slider(figure, chart, state, paint);
    return paint;
  }

  const paints = charts.map(draw);
  let width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    for (const paint of paints) paint();
  }).observe(document.body);
  document.documentElement.dataset.drawn = charts.length;
})();
