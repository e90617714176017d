"use strict";
// A map of heads by any metric; a click, a link or the arrow keys open a head.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const pad = (n) => String(n).padStart(2, "0");
  const nameOf = (layer, head) => `l${pad(layer)}h${pad(head)}`;
  const state = { run: 0, other: null, metric: 0, head: null, brushed: new Set() };
  const numberOf = new Map(data.metrics.map((metric, m) => [metric.column, m]));
  const indexOf = data.runs.map((run) => new Map(run.layer.map((layer, i) => [nameOf(layer, run.head[i]), i])));

  // ---- small things --------------------------------------------------------------------------

  function short(x) {
    if (x === null || x === undefined) return "–";
    const size = Math.abs(x);
    return size !== 0 && (size < 1e-3 || size >= 1e5) ? x.toExponential(2) : Number(x.toPrecision(3)).toString();
  }
  function element(kind, text, className) {
    const item = document.createElement(kind);
    if (text !== undefined) item.textContent = text;
    if (className) item.className = className;
    return item;
  }
  function fill(select, names, values) {
    names.forEach((name, i) => {
      const item = element("option", name);
      item.value = String(values ? values[i] : i);
      select.append(item);
    });
  }
  const brief = (text) => (text.length > 34 ? `${text.slice(0, 33)}…` : text);
  // Plotly reads markup in its labels, so what a user named is escaped for it too.
  const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const value = (r, metric, i) => data.runs[r].values[metric][i];
  const columnValue = (r, column, i) => (numberOf.has(column) ? value(r, numberOf.get(column), i) : null);
  const config = { displaylogo: false, responsive: true, displayModeBar: false };

  function look(more) {
    const axis = { color: css("--soft"), gridcolor: css("--line"), zerolinecolor: css("--soft"), linecolor: css("--line") };
    const layout = Object.assign({
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), size: 11, family: "system-ui, DejaVu Sans, sans-serif" },
      margin: { l: 52, r: 12, t: 30, b: 40 }, showlegend: false, hoverlabel: { align: "left" },
    }, more);
    for (const name of ["xaxis", "yaxis"]) layout[name] = Object.assign({}, axis, layout[name]);
    return layout;
  }

  const CHOSEN = "#00a5c4";
  // Negative is purple, positive orange, as in the report's maps.
  const DIVERGING = [[0, "#2d004b"], [0.125, "#542788"], [0.25, "#8073ac"], [0.375, "#b2abd2"], [0.5, "#f7f7f7"], [0.625, "#fdb863"], [0.75, "#e08214"], [0.875, "#b35806"], [1, "#7f3b08"]];

  // ---- the map -------------------------------------------------------------------------------

  function limits(columns, signed) {
    const values = columns.flat().filter((x) => x !== null);
    if (!values.length) return [0, 1];
    // The outermost 1% must not take the colours from all others.
    const sorted = [...values].sort((a, b) => a - b), at = (p) => sorted[Math.min(sorted.length - 1, Math.floor(p * sorted.length))];
    if (signed) { const most = Math.max(Math.abs(at(0.01)), Math.abs(at(0.99))) || 1; return [-most, most]; }
    return [at(0.01), at(0.99) === at(0.01) ? at(0.01) + 1 : at(0.99)];
  }
  function layerNames(r) {
    const run = data.runs[r], nope = new Set(run.nope), sliding = new Set(run.sliding);
    return (layer) => `${layer}${nope.has(layer) ? " ∅" : ""}${sliding.has(layer) ? " ≀" : ""}`;
  }
  function hover(r, i, extra) {
    const run = data.runs[r];
    const lines = [`<b>${nameOf(run.layer[i], run.head[i])}</b>  ${plain(run.taxonomy[i])}`];
    if (extra) lines.push(extra);
    const shown = [data.metrics[state.metric].column, "r_q", "r_k", "r_k_a", "bias_window", "posvar_q"];
    for (const column of new Set(shown)) if (numberOf.has(column)) lines.push(`${column} ${short(columnValue(r, column, i))}`);
    return lines.join("<br>");
  }
  function grid(r, values, texts) {
    const run = data.runs[r];
    const layers = Math.max(...run.layer) + 1, heads = Math.max(...run.head) + 1;
    const z = Array.from({ length: layers }, () => Array(heads).fill(null));
    const text = Array.from({ length: layers }, () => Array(heads).fill(""));
    run.layer.forEach((layer, i) => { z[layer][run.head[i]] = values[i]; text[layer][run.head[i]] = texts(i); });
    return { z, text, layers, heads };
  }
  function mapMark(r) {
    const i = state.head === null ? undefined : indexOf[r].get(state.head);
    if (i === undefined) return [];
    const { layer, head } = data.runs[r];
    return [{ type: "rect", x0: head[i] - 0.5, x1: head[i] + 0.5, y0: layer[i] - 0.5, y1: layer[i] + 0.5, line: { color: CHOSEN, width: 3 } }];
  }
  function drawMap(place, title, r, values, texts, range, signed, bar) {
    const { z, text, layers, heads } = grid(r, values, texts), run = data.runs[r], label = layerNames(r);
    const step = Math.ceil(layers / 20), every = Array.from({ length: layers }, (_, l) => l).filter((l) => l % step === 0 || /[∅≀]/.test(label(l)) && layers < 50);
    const traces = [{
      type: "heatmap", z, text, hoverinfo: "text", zmin: range[0], zmax: range[1], xgap: 1, ygap: 1, showscale: bar,
      colorscale: signed ? DIVERGING : "Viridis", colorbar: { thickness: 9, len: 0.9, outlinewidth: 0, tickfont: { size: 9 } },
    }];
    const spots = [...state.brushed].filter((name) => indexOf[r].has(name)).map((name) => indexOf[r].get(name));
    traces.push({ type: "scatter", mode: "markers", hoverinfo: "skip", x: spots.map((i) => run.head[i]), y: spots.map((i) => run.layer[i]), marker: { symbol: "circle", size: 5, color: "#fff", line: { color: "#111", width: 1.2 } } });
    const height = Math.max(230, Math.min(620, 90 + layers * 13));
    Plotly.react(place, traces, look({
      title: { text: plain(brief(title)), font: { size: 12 }, x: 0.02, xanchor: "left" }, height, margin: { l: 46, r: bar ? 50 : 8, t: 30, b: 36 }, shapes: mapMark(r),
      xaxis: { title: { text: "query head", font: { size: 10 } }, range: [-0.5, heads - 0.5], dtick: heads > 16 ? 4 : heads > 8 ? 2 : 1, showgrid: false, zeroline: false, fixedrange: true },
      yaxis: { title: { text: "layer", font: { size: 10 } }, range: [layers - 0.5, -0.5], tickvals: every, ticktext: every.map(label), showgrid: false, zeroline: false, fixedrange: true },
    }), config);
    Plotly.Plots.resize(place); // the columns beside it may have come or gone
    if (!place.listening) {
      place.listening = true;
      place.on("plotly_click", (event) => {
        const spot = event.points.find((point) => point.z !== undefined && point.z !== null) || event.points[0];
        choose(nameOf(Math.round(spot.y), Math.round(spot.x)));
      });
    }
  }
  function mapPlaces(count) {
    const maps = $("maps");
    while (maps.children.length > count) { Plotly.purge(maps.lastChild); maps.lastChild.remove(); }
    while (maps.children.length < count) maps.append(element("div"));
    return [...maps.children];
  }
  function drawMaps() {
    const m = state.metric, metric = data.metrics[m];
    if (!metric) return;
    const { run, other } = state, a = data.runs[run];
    if (other === null) {
      drawMap(mapPlaces(1)[0], `${a.label}: ${metric.column}`, run, a.values[m], (i) => hover(run, i), limits([a.values[m]], metric.signed), metric.signed, true);
      return;
    }
    const b = data.runs[other], range = limits([a.values[m], b.values[m]], metric.signed), places = mapPlaces(3);
    const changes = a.layer.map((layer, i) => {
      const j = indexOf[other].get(nameOf(layer, a.head[i]));
      const before = a.values[m][i], after = j === undefined ? null : b.values[m][j];
      return before === null || after === null || after === undefined ? null : after - before;
    });
    drawMap(places[0], a.label, run, a.values[m], (i) => hover(run, i), range, metric.signed, false);
    drawMap(places[1], b.label, other, b.values[m], (i) => hover(other, i), range, metric.signed, true);
    drawMap(places[2], "second minus first", run, changes, (i) => hover(run, i, `difference ${short(changes[i])}`), limits([changes], true), true, true);
  }

  // ---- r_q and r_k ---------------------------------------------------------------------------

  function scatterMarks() {
    const line = (x0, y0, x1, y1) => ({ type: "line", x0, y0, x1, y1, line: { color: css("--line"), width: 1, dash: "dash" }, layer: "below" });
    const marks = [0.3, 0.7].flatMap((t) => [line(t, -1, t, 1), line(-0.1, t, 1, t), line(-0.1, -t, 1, -t)]);
    const i = state.head === null ? undefined : indexOf[state.run].get(state.head);
    const x = i === undefined ? null : columnValue(state.run, "r_q", i), y = i === undefined ? null : columnValue(state.run, "r_k", i);
    if (x !== null && y !== null) marks.push({ type: "rect", xsizemode: "pixel", ysizemode: "pixel", xanchor: x, yanchor: y, x0: -7, x1: 7, y0: -7, y1: 7, line: { color: CHOSEN, width: 3 } });
    return marks;
  }
  function drawScatter() {
    const place = $("scatter");
    if (!numberOf.has("r_q") || !numberOf.has("r_k")) { place.hidden = true; return; }
    const shown = state.other === null ? [state.run] : [state.run, state.other], colours = ["#2b7bba", "#e08214"];
    const traces = shown.map((r, n) => {
      const run = data.runs[r];
      return {
        type: "scatter", mode: "markers", name: plain(run.label), hoverinfo: "text", text: run.layer.map((_, i) => hover(r, i)),
        x: run.values[numberOf.get("r_q")], y: run.values[numberOf.get("r_k")], customdata: run.layer.map((layer, i) => nameOf(layer, run.head[i])),
        marker: { size: 6, color: colours[n], opacity: 0.8 }, unselected: { marker: { opacity: 0.2 } },
      };
    });
    Plotly.react(place, traces, look({
      height: 320, dragmode: "select", shapes: scatterMarks(), showlegend: shown.length > 1, legend: { orientation: "h", y: 1.12, font: { size: 10 } },
      xaxis: { title: { text: "r_q on PC0", font: { size: 10 } }, range: [-0.1, 1.02], zeroline: false, fixedrange: true },
      yaxis: { title: { text: "r_k on PC0", font: { size: 10 } }, range: [-1.02, 1.02], fixedrange: true },
    }), config);
    if (!place.listening) {
      place.listening = true;
      // Plotly says "selected" once more, of nothing, whenever the plot is touched; a double click deselects.
      place.on("plotly_selected", (event) => { if (event && event.points.length) brush(event.points.map((point) => point.customdata).filter(Boolean)); });
      place.on("plotly_deselect", () => brush([]));
      place.on("plotly_click", (event) => { if (event.points[0].customdata) choose(event.points[0].customdata); });
    }
  }
  function brush(names) {
    state.brushed = new Set(names);
    $("brushed").textContent = state.brushed.size ? `${state.brushed.size} heads marked.` : "";
    drawMaps();
  }

  // ---- points of a head ----------------------------------------------------------------------

  function unpack(r, i) {
    const script = $(`points-${r}-${i}`);
    if (!script) return null;
    const bytes = Uint8Array.from(atob(script.textContent.trim()), (c) => c.charCodeAt(0)), wide = 4, narrow = data.complementAxes;
    const ranges = new Float32Array(bytes.buffer, 0, 2 * (wide + narrow));
    let at = ranges.byteLength;
    const counts = new Uint16Array(bytes.buffer, at, 2);
    at += 4;
    const kinds = { q: {}, k: {} }, size = data.runs[r].window || 1;
    const column = (array, c) => Float32Array.from(array, (x) => ranges[2 * c] + ranges[2 * c + 1] * x);
    [["q", counts[0]], ["k", counts[1]]].forEach(([kind, n]) => {
      const take = () => { const part = new Uint16Array(bytes.buffer, at, n); at += 2 * n; return part; };
      kinds[kind].position = Float32Array.from(take(), (x) => (x / 65535) * size);
      ["pc0", "pc1", "a", "b"].forEach((name, c) => { kinds[kind][name] = column(take(), c); });
    });
    [["q", counts[0]], ["k", counts[1]]].forEach(([kind, n]) => {
      kinds[kind].svd = Array.from({ length: narrow }, (_, c) => { const part = column(bytes.subarray(at, at + n), wide + c); at += n; return part; });
    });
    return kinds;
  }
  const scales = { q: [[0, "#a6cbe6"], [1, "#08306b"]], k: [[0, "#fcae91"], [1, "#67000d"]] };
  const darkScales = { q: [[0, "#d6eaf8"], [1, "#2f8fe0"]], k: [[0, "#ffd9cc"], [1, "#f0452d"]] };
  const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const scaleOf = (kind) => (isDark() ? darkScales : scales)[kind];
  function regression(x, y) {
    const n = x.length, mx = x.reduce((s, v) => s + v, 0) / n, my = y.reduce((s, v) => s + v, 0) / n;
    let sxy = 0, sxx = 0;
    x.forEach((v, i) => { sxy += (v - mx) * (y[i] - my); sxx += (v - mx) ** 2; });
    const sorted = Float32Array.from(x).sort(), ends = [sorted[Math.floor(0.02 * n)], sorted[Math.floor(0.98 * (n - 1))]];
    return { x: ends, y: ends.map((v) => my + (sxx ? sxy / sxx : 0) * (v - mx)) };
  }
  // Each point is an element of the page, and elements take time: the clouds show these many of each kind.
  const SHOWN = 200;
  function drawCloud(place, points, x, y, title, labels, window, lines) {
    const traces = ["q", "k"].map((kind) => {
      const n = points[kind].position.length, some = (column) => (n <= SHOWN ? column : column.filter((_, i) => (i * SHOWN) % n < SHOWN));
      const position = some(points[kind].position);
      return {
        type: "scatter", mode: "markers", hoverinfo: "x+y+text", name: kind, x: some(points[kind][x]), y: some(points[kind][y]), text: Array.from(position, (t) => `${kind === "q" ? "query" : "key"} at ${Math.round(t)}`),
        marker: { size: 5, color: position, cmin: 0, cmax: window, colorscale: scaleOf(kind), opacity: 0.75 },
      };
    });
    if (lines) for (const kind of ["q", "k"]) traces.push(Object.assign({ type: "scatter", mode: "lines", hoverinfo: "skip", line: { width: 2.5, color: kind === "q" ? "#2b7bba" : "#d6402b" } }, regression(points[kind][x], points[kind][y])));
    Plotly.react(place, traces, look({ height: 265, title: { text: title, font: { size: 11 }, x: 0.02, xanchor: "left" }, margin: { l: 46, r: 8, t: 28, b: 36 }, xaxis: { title: { text: labels[0], font: { size: 10 } }, zeroline: false }, yaxis: { title: { text: labels[1], font: { size: 10 } }, zeroline: false } }), config);
  }
  function colours(kind) {
    const [[, low], [, high]] = scaleOf(kind), part = (text, at) => parseInt(text.slice(at, at + 2), 16);
    return Array.from({ length: 33 }, (_, n) => `rgb(${[1, 3, 5].map((at) => Math.round(part(low, at) + ((part(high, at) - part(low, at)) * n) / 32)).join(",")})`);
  }
  function drawRing(canvas, points, plane, window) {
    const size = canvas.width = canvas.height = 220, brush = canvas.getContext("2d");
    const [u, v] = [2 * plane, 2 * plane + 1];
    const most = Math.max(...["q", "k"].flatMap((kind) => [...points[kind].svd[u], ...points[kind].svd[v]].map(Math.abs))) || 1;
    brush.globalAlpha = 0.75;
    const shades = { q: colours("q"), k: colours("k") };
    const n = Math.max(points.q.position.length, points.k.position.length);
    for (let i = 0; i < n; i += 1) for (const kind of ["q", "k"]) {
      if (i >= points[kind].position.length) continue;
      brush.fillStyle = shades[kind][Math.round(32 * Math.min(1, points[kind].position[i] / window))];
      brush.fillRect(size / 2 + (points[kind].svd[u][i] / most) * size * 0.46 - 2, size / 2 - (points[kind].svd[v][i] / most) * size * 0.46 - 2, 4, 4);
    }
  }
  function drawClouds() {
    const shown = state.other === null ? [state.run] : [state.run, state.other], host = $("clouds");
    while (host.children.length > shown.length) { host.lastChild.querySelectorAll(".js-plotly-plot").forEach((plot) => Plotly.purge(plot)); host.lastChild.remove(); }
    while (host.children.length < shown.length) {
      const box = element("div", undefined, "run");
      box.append(element("h3"), element("div", undefined, "pc"), element("div", undefined, "ab"), element("div", undefined, "spectrum"), element("div", undefined, "rope"), element("div", undefined, "distance"), element("div", undefined, "plasticity"), element("div", undefined, "rings"), element("p", undefined, "soft"));
      host.append(box);
    }
    shown.forEach((r, n) => {
      const box = host.children[n], [label, pc, ab, spectrum, rope, distance, plasticity, rings, none] = box.children, i = indexOf[r].get(state.head);
      label.textContent = shown.length > 1 ? data.runs[r].label : "";
      label.hidden = shown.length === 1;
      const points = i === undefined ? null : unpack(r, i), window = data.runs[r].window || (points ? Math.max(...points.q.position) : 1);
      pc.hidden = ab.hidden = rings.hidden = points === null;
      none.textContent = points !== null ? "Blue: queries, red: keys; the later the darker. Bars and rings: planes of what is left off a and b, with their share and angle_r; filled bars and ✓ turn with position." : i === undefined ? "This run has no such head." : "No points of this head in the page: qkscope view RUN adds those of every head, qkscope analyze --points those you name.";
      if (points !== null) {
        drawCloud(pc, points, "pc0", "pc1", "principal components", ["PC0", "PC1"], window, false);
        drawCloud(ab, points, "a", "b", "drift and separation", ["axis a: drift", "axis b: separation"], window, true);
      }
      const planes = (data.planes[r] || [])[i] || [];
      drawSpectrum(spectrum, planes);
      // What is further down the panel is drawn once its top is on the screen.
      const name = state.head;
      requestAnimationFrame(() => setTimeout(() => {
        if (state.head !== name) return;
        drawRope(rope, (data.rope[r] || [])[i] || []);
        drawDistance(distance, (data.distance[r] || [])[i] || []);
        drawPlasticity(plasticity, (data.plasticity[r] || [])[i] || []);
        if (points !== null) drawRings(rings, points, planes, window);
      }, 0));
    });
  }
  function drawSpectrum(place, planes) {
    place.hidden = planes.length === 0;
    if (!planes.length) return;
    Plotly.react(place, [{
      type: "bar", x: planes.map((_, p) => p), y: planes.map((plane) => plane[0]), hoverinfo: "text", textposition: "none",
      text: planes.map((plane, p) => `plane ${p}: share ${short(plane[0])}<br>angle_r ${short(plane[1])}<br>${short(plane[2])} radians per token`),
      marker: { color: planes.map((plane) => (plane[3] ? "#7b5aa6" : css("--line"))) },
    }], look({ height: 170, title: { text: "share of each plane of the complement", font: { size: 11 }, x: 0.02, xanchor: "left" }, margin: { l: 46, r: 8, t: 28, b: 30 }, xaxis: { dtick: 5, zeroline: false }, yaxis: { tickformat: ".0%", nticks: 4 } }), config);
  }
  const small = (title, x, y) => look({ height: 260, title: { text: title, font: { size: 11 }, x: 0.02, xanchor: "left" }, margin: { l: 46, r: 8, t: 28, b: 74 }, showlegend: true, legend: { orientation: "h", y: -0.26, yanchor: "top", x: 0, font: { size: 9 } }, xaxis: x, yaxis: y });
  function drawRope(place, columns) {
    place.hidden = columns.length === 0;
    if (!columns.length) return;
    const [cycles, share, lockQ, lockK, bias] = columns, planes = cycles.map((_, p) => p), said = cycles.map((c, p) => `plane ${p}: ${short(c)} turns over the window`);
    const line = (name, y, colour) => ({ type: "scatter", mode: "lines+markers", marker: { size: 4 }, line: { width: 1.5 }, name, x: planes, y, text: said, hoverinfo: "text+y+name", ...{ marker: { size: 4, color: colour }, line: { width: 1.5, color: colour } } });
    Plotly.react(place, [{ type: "bar", name: "bias", x: planes, y: bias, text: said, textposition: "none", hoverinfo: "text+y+name", marker: { color: "#c98b2b" } }, line("variance", share, "#5b7553"), line("lock q", lockQ, "#2b7bba"), line("lock k", lockK, "#d6402b")],
      small("RoPE planes, fastest first: shares and locks", { zeroline: false }, { range: [0, 1] }), config);
  }
  function drawDistance(place, columns) {
    place.hidden = columns.length === 0;
    if (!columns.length) return;
    const [low, high, measured, error, predicted] = columns, x = low.map((a, n) => Math.sqrt(a * high[n]));
    Plotly.react(place, [{ type: "scatter", mode: "markers", name: "measured", x, y: measured, error_y: { type: "data", array: error.map((e) => e || 0), thickness: 1, width: 0 }, marker: { size: 5, color: css("--ink") } }, { type: "scatter", mode: "lines", name: "predicted from means", x, y: predicted, line: { color: "#d2691e", width: 2 } }],
      small("mean score at each distance", { type: "log", title: { text: "distance (tokens)", font: { size: 10 } } }, { zeroline: false }), config);
  }
  function drawPlasticity(place, columns) {
    place.hidden = columns.length === 0;
    if (!columns.length) return;
    const [x, ap, error, published, fixed] = columns;
    const line = (name, y, colour, dash) => ({ type: "scatter", mode: "lines", name, x, y, line: { color: colour, width: 1.5, dash } });
    const lines = [{ type: "scatter", mode: "lines+markers", name: "exact", x, y: ap, error_y: { type: "data", array: error.map((e) => e || 0), thickness: 1, width: 0 }, marker: { size: 5, color: css("--ink") }, line: { width: 1, color: css("--ink") } }];
    if (fixed.some((v) => v !== null)) lines.push(line("in one place", fixed, "#1f8a70"));
    lines.push(line("published", published, "#b5651d", "dash"));
    Plotly.react(place, lines, small("plasticity along the window", { title: { text: "position of the query", font: { size: 10 } }, zeroline: false }, { range: [0, 1] }), config);
  }
  function drawRings(host, points, planes, window) {
    const count = Math.min(points.q.svd.length / 2, planes.length || 6);
    while (host.children.length > count) host.lastChild.remove();
    while (host.children.length < count) { const figure = element("figure"); figure.append(element("canvas"), element("figcaption")); host.append(figure); }
    [...host.children].forEach((figure, plane) => {
      drawRing(figure.children[0], points, plane, window);
      const said = planes[plane];
      figure.children[1].textContent = said ? `${plane}: ${(100 * said[0]).toFixed(1)}%, ${said[1] < 0 ? "−" : ""}${Math.abs(said[1]).toFixed(2)}${said[3] ? " ✓" : ""}` : `plane ${plane}`;
    });
  }

  // ---- the chosen head -----------------------------------------------------------------------

  function drawNumbers() {
    const shown = state.other === null ? [state.run] : [state.run, state.other];
    const head = element("tr");
    head.append(element("th", "number and meaning"), ...shown.map((r) => element("th", shown.length > 1 ? data.runs[r].label : "value")), ...(shown.length > 1 ? [element("th", "difference")] : [element("th", "95% interval")]));
    const rows = data.metrics.map((metric, m) => {
      const row = element("tr"), values = shown.map((r) => { const i = indexOf[r].get(state.head); return i === undefined ? null : value(r, m, i); });
      const what = element("th", metric.column);
      what.append(element("span", metric.meaning + (metric.unit ? ` [${metric.unit}]` : "")));
      row.append(what, ...values.map((x) => element("td", short(x))));
      if (shown.length > 1) row.append(element("td", values.includes(null) ? "–" : short(values[1] - values[0])));
      else {
        const ends = data.runs[state.run].ends[metric.column], i = indexOf[state.run].get(state.head);
        const known = ends && i !== undefined && ends[0][i] !== null;
        row.append(element("td", known ? `${short(ends[0][i])} … ${short(ends[1][i])}` : ""));
      }
      return row;
    });
    const top = element("thead"), body = element("tbody");
    top.append(head); body.append(...rows);
    $("numbers").replaceChildren(top, body);
  }
  function drawHead() {
    const none = state.head === null;
    $("nothing").hidden = !none; $("chosen").hidden = none;
    if (none) return;
    const run = data.runs[state.run], i = indexOf[state.run].get(state.head);
    $("name").textContent = `${run.label} · ${state.head}`;
    const notes = [];
    if (i !== undefined) {
      if (run.taxonomy[i]) notes.push(run.taxonomy[i]);
      if (run.key.length && run.key[i] >= 0) notes.push(`reads key head ${run.key[i]}`);
      if (run.nope.includes(run.layer[i])) notes.push("no rotary encoding in this layer");
      if (run.sliding.includes(run.layer[i])) notes.push("sliding window");
      if (run.flags.length && run.flags[i]) notes.push(`flags: ${run.flags[i]}`);
    }
    $("about").textContent = notes.join(" · ");
    drawClouds();
    drawNumbers();
  }
  function choose(name) {
    if (!indexOf[state.run].has(name) && !(state.other !== null && indexOf[state.other].has(name))) return;
    const start = performance.now();
    state.head = name;
    drawHead();
    document.body.dataset.headMs = (performance.now() - start).toFixed(1);
    remember();
    // Once the head is on the screen, move the marks; nothing else on the maps has changed.
    requestAnimationFrame(() => setTimeout(moveMarks, 0));
  }
  function moveMarks() {
    const shown = [state.run, state.other, state.run];
    [...$("maps").children].forEach((place, n) => Plotly.relayout(place, { shapes: mapMark(shown[n]) }));
    if (!$("scatter").hidden) Plotly.relayout($("scatter"), { shapes: scatterMarks() });
  }
  function move(down, right) {
    const run = data.runs[state.run];
    if (state.head === null) { choose(nameOf(run.layer[0], run.head[0])); return; }
    const i = indexOf[state.run].get(state.head) ?? 0;
    const layers = [...new Set(run.layer)].sort((a, b) => a - b);
    const nearest = (list, want) => list.reduce((best, x) => (Math.abs(x - want) < Math.abs(best - want) ? x : best));
    const headsOf = (layer) => run.head.filter((_, j) => run.layer[j] === layer).sort((a, b) => a - b);
    const at = layers.indexOf(run.layer[i]), layer = layers[Math.max(0, Math.min(layers.length - 1, at + down))];
    const heads = headsOf(layer), here = heads.indexOf(nearest(heads, run.head[i]));
    choose(nameOf(layer, heads[Math.max(0, Math.min(heads.length - 1, here + right))]));
  }

  // ---- links: #l05h13;run=…;vs=…;metric=… ----------------------------------------------------

  function remember() {
    const parts = [state.head || ""];
    if (state.run) parts.push(`run=${encodeURIComponent(data.runs[state.run].label)}`);
    if (state.other !== null) parts.push(`vs=${encodeURIComponent(data.runs[state.other].label)}`);
    if (data.metrics[state.metric] && data.metrics[state.metric].column !== data.first) parts.push(`metric=${data.metrics[state.metric].column}`);
    history.replaceState(null, "", `#${parts.join(";")}`);
  }
  function recall() {
    const [head, ...rest] = location.hash.slice(1).split(";");
    const find = (label) => { const r = data.runs.findIndex((run) => run.label === label); return r < 0 ? null : r; };
    state.run = 0; state.other = null; state.metric = numberOf.get(data.first) ?? 0;
    for (const part of rest) {
      const [key, text] = part.split("=");
      let said = "";
      try { said = decodeURIComponent(text || ""); } catch { continue; }
      if (key === "run") state.run = find(said) ?? 0;
      if (key === "vs") state.other = find(said);
      if (key === "metric" && numberOf.has(said)) state.metric = numberOf.get(said);
    }
    state.head = /^l\d+h\d+$/.test(head) && data.runs.some((_, r) => indexOf[r].has(head)) ? head : null;
  }
  function show() {
    $("run").value = String(state.run);
    $("other").value = state.other === null ? "" : String(state.other);
    $("metric").value = String(state.metric);
    const metric = data.metrics[state.metric];
    $("meaning").textContent = metric ? `${metric.column}: ${metric.meaning}${metric.unit ? ` [${metric.unit}]` : ""}` : "";
    const run = data.runs[state.run];
    $("marks").textContent = [run.nope.length ? "∅: no rotary encoding." : "", run.sliding.length ? "≀: sliding window." : ""].join(" ");
    drawMaps();
    drawScatter();
    drawHead();
  }

  fill($("run"), data.runs.map((run) => run.label));
  fill($("other"), data.runs.map((run) => run.label));
  fill($("metric"), data.metrics.map((metric) => metric.column));
  $("run").addEventListener("change", (event) => { state.run = Number(event.target.value); remember(); show(); });
  $("other").addEventListener("change", (event) => { state.other = event.target.value === "" ? null : Number(event.target.value); remember(); show(); });
  $("metric").addEventListener("change", (event) => { state.metric = Number(event.target.value); remember(); show(); });
  $("theme").addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; show(); });
  addEventListener("hashchange", () => { recall(); show(); });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(input|select|textarea)$/i.test(event.target.tagName)) return;
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (step) { event.preventDefault(); move(...step); }
  });
  recall();
  show();
})();
