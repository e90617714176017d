"use strict";
// A map of heads by any metric; a click, a link, the list or the arrow keys open a head.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const pad = (n) => String(n).padStart(2, "0");
  const nameOf = (layer, head) => `l${pad(layer)}h${pad(head)}`;
  const state = { run: 0, other: null, metric: 0, head: null, box: null, find: "", down: true, text: {} };
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
  const brief = (text, most = 46) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
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
    const low = at(0.01) >= 0 && at(0.01) < 0.5 * at(0.99) ? 0 : at(0.01);
    return [low, at(0.99) === low ? low + 1 : at(0.99)];
  }
  // What has both signs is coloured from the middle; what has one, from one end.
  const twoSided = (metric, columns) => metric.signed && columns.flat().some((x) => x !== null && x < 0);
  function layerNames(r) {
    const run = data.runs[r], nope = new Set(run.nope), sliding = new Set(run.sliding);
    return (layer) => `${layer}${nope.has(layer) ? " ∅" : ""}${sliding.has(layer) ? " ≀" : ""}`;
  }
  function hover(r, i, extra) {
    const run = data.runs[r];
    const lines = [`<b>${nameOf(run.layer[i], run.head[i])}</b>  ${plain(run.kind[i])}`];
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
    const spots = [...marked()].filter((name) => indexOf[r].has(name)).map((name) => indexOf[r].get(name));
    traces.push({ type: "scatter", mode: "markers", hoverinfo: "skip", x: spots.map((i) => run.head[i]), y: spots.map((i) => run.layer[i]), marker: { symbol: "circle", size: 5, color: "#fff", line: { color: "#111", width: 1.2 } } });
    const height = Math.max(230, Math.min(620, 90 + layers * 13));
    Plotly.react(place, traces, look({
      title: { text: plain(brief(title, 34)), font: { size: 12 }, x: 0.02, xanchor: "left" }, height, margin: { l: 46, r: bar ? 50 : 8, t: 30, b: 36 }, shapes: mapMark(r),
      xaxis: { title: { text: "query head", font: { size: 10 } }, range: [-0.5, heads - 0.5], dtick: heads > 16 ? 4 : heads > 8 ? 2 : 1, showgrid: false, zeroline: false, fixedrange: true },
      yaxis: { title: { text: "layer", font: { size: 10 } }, range: [layers - 0.5, -0.5], tickvals: every, ticktext: every.map(label), showgrid: false, zeroline: false, fixedrange: true },
    }), config);
    Plotly.Plots.resize(place); // the columns beside it may have come or gone
    if (!place.listening) {
      place.listening = true;
      place.on("plotly_click", (event) => {
        const spot = event.points.find((point) => point.z !== undefined && point.z !== null) || event.points[0];
        choose(nameOf(Math.round(spot.y), Math.round(spot.x)), true);
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
      const signed = twoSided(metric, [a.values[m]]);
      drawMap(mapPlaces(1)[0], `${a.label}: ${metric.column}`, run, a.values[m], (i) => hover(run, i), limits([a.values[m]], signed), signed, true);
      return;
    }
    const b = data.runs[other], signed = twoSided(metric, [a.values[m], b.values[m]]), range = limits([a.values[m], b.values[m]], signed), places = mapPlaces(3);
    const changes = a.layer.map((layer, i) => {
      const j = indexOf[other].get(nameOf(layer, a.head[i]));
      const first = a.values[m][i], second = j === undefined ? null : b.values[m][j];
      return first === null || second === null || second === undefined ? null : first - second;
    });
    drawMap(places[0], a.label, run, a.values[m], (i) => hover(run, i), range, signed, false);
    drawMap(places[1], b.label, other, b.values[m], (i) => hover(other, i), range, signed, true);
    drawMap(places[2], "first minus second", run, changes, (i) => hover(run, i, `difference ${short(changes[i])}`), limits([changes], true), true, true);
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
        marker: { size: 6, color: colours[n], opacity: 0.85 }, selected: { marker: { opacity: 1 } }, unselected: { marker: { opacity: 0.15 } },
        selectedpoints: state.box ? run.layer.map((_, i) => i).filter((i) => inBox(r, i)) : null,
      };
    });
    // A box in the units of the axes stays where it is when the plot is drawn again.
    const selections = state.box ? [{ type: "rect", xref: "x", yref: "y", x0: state.box[0], x1: state.box[1], y0: state.box[2], y1: state.box[3], line: { color: CHOSEN, width: 2, dash: "dot" } }] : [];
    place.drawing = true;
    Plotly.react(place, traces, look({
      height: 320, dragmode: "select", shapes: scatterMarks(), selections, showlegend: shown.length > 1, legend: { orientation: "h", y: 1.12, font: { size: 10 } },
      xaxis: { title: { text: "r_q on PC0", font: { size: 10 } }, range: [-0.1, 1.02], zeroline: false, fixedrange: true },
      yaxis: { title: { text: "r_k on PC0", font: { size: 10 } }, range: [-1.02, 1.02], fixedrange: true },
    }), config).then(() => { place.drawing = false; });
    if (!place.listening) {
      place.listening = true;
      place.on("plotly_selected", (event) => { if (!place.drawing && event && event.range) brush([...event.range.x, ...event.range.y]); });
      place.on("plotly_deselect", () => { if (!place.drawing && state.box) brush(null); });
      place.on("plotly_click", (event) => { if (event.points[0].customdata) choose(event.points[0].customdata, true); });
    }
  }
  function inBox(r, i) {
    const x = columnValue(r, "r_q", i), y = columnValue(r, "r_k", i), [x0, x1, y0, y1] = state.box;
    return x !== null && y !== null && x >= Math.min(x0, x1) && x <= Math.max(x0, x1) && y >= Math.min(y0, y1) && y <= Math.max(y0, y1);
  }
  function brush(box) {
    state.box = box && box.map((x) => Number(x.toFixed(3)));
    remember();
    drawScatter(); drawMaps(); drawList();
  }

  // ---- finding heads: "l07h00", "class:content", "decay>1" -------------------------------------

  function matcher(r) {
    const tests = [];
    for (const word of state.find.toLowerCase().split(/\s+/).filter(Boolean)) {
      const compared = word.match(/^([a-z_0-9]+)(>=|<=|>|<|=)(-?[\d.]+(?:e-?\d+)?)$/);
      if (compared) {
        const [, name, sign, text] = compared, limit = Number(text);
        const column = numberOf.has(name) ? name : data.metrics.map((metric) => metric.column).filter((other) => other.startsWith(name)).sort((a, b) => data.preferred.includes(b) - data.preferred.includes(a))[0];
        if (column === undefined) return { test: () => false, problem: `no number is called ${name}` };
        const of = { ">": (x) => x > limit, "<": (x) => x < limit, ">=": (x) => x >= limit, "<=": (x) => x <= limit, "=": (x) => x === limit }[sign];
        tests.push((i) => { const x = columnValue(r, column, i); return x !== null && of(x); });
      } else if (word.startsWith("class:")) tests.push((i) => data.runs[r].kind[i].includes(word.slice(6)));
      else tests.push((i) => nameOf(data.runs[r].layer[i], data.runs[r].head[i]).startsWith(word) || data.runs[r].kind[i].includes(word));
    }
    return { test: (i) => tests.every((test) => test(i)), problem: "" };
  }
  function matching(r) {
    const { test, problem } = matcher(r), heads = data.runs[r].layer.map((_, i) => i).filter((i) => test(i) && (!state.box || inBox(r, i)));
    return { heads, problem };
  }
  function marked() {
    if (!state.box && !state.find.trim()) return new Set();
    return new Set(matching(state.run).heads.map((i) => nameOf(data.runs[state.run].layer[i], data.runs[state.run].head[i])));
  }
  const MOST_LISTED = 300;
  function spark(name) {
    const values = data.runs.map((_, r) => { const i = indexOf[r].get(name); return i === undefined ? null : value(r, state.metric, i); });
    const known = values.filter((x) => x !== null);
    if (known.length < 2) return "";
    const low = Math.min(...known), high = Math.max(...known), y = (x) => (high === low ? 8 : 15 - (14 * (x - low)) / (high - low));
    const dots = values.map((x, r) => (x === null ? null : `${(2 + (56 * r) / (values.length - 1)).toFixed(1)},${y(x).toFixed(1)}`)).filter(Boolean);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS(svg.namespaceURI, "polyline"), dot = document.createElementNS(svg.namespaceURI, "circle");
    svg.setAttribute("viewBox", "0 0 60 16"); svg.setAttribute("class", "spark"); svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `over the runs: ${values.map(short).join(", ")}`);
    line.setAttribute("points", dots.join(" "));
    const at = values[state.run];
    if (at !== null) { dot.setAttribute("cx", (2 + (56 * state.run) / (values.length - 1)).toFixed(1)); dot.setAttribute("cy", y(at).toFixed(1)); dot.setAttribute("r", "2.2"); }
    svg.append(line, dot);
    return svg;
  }
  function drawList() {
    const run = data.runs[state.run], { heads, problem } = matching(state.run), m = state.metric, sign = state.down ? -1 : 1;
    const key = (i) => value(state.run, m, i);
    heads.sort((a, b) => { const x = key(a), y = key(b); return x === null || y === null ? (x === null) - (y === null) : sign * (x - y) || a - b; });
    $("status").textContent = problem || (state.find.trim() || state.box ? `${heads.length} of ${run.layer.length} heads` : "");
    const top = element("tr"), many = data.runs.length > 1;
    const sort = element("button", `${data.metrics[m] ? data.metrics[m].column : "value"} ${state.down ? "↓" : "↑"}`);
    sort.type = "button"; sort.title = "sort the other way round";
    sort.addEventListener("click", () => { state.down = !state.down; drawList(); });
    const sorted = element("th");
    sorted.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    sorted.append(sort);
    top.append(element("th", "head"), element("th", "class"), sorted, ...(many ? [element("th", "over runs")] : []));
    const rows = heads.slice(0, MOST_LISTED).map((i) => {
      const row = element("tr"), name = nameOf(run.layer[i], run.head[i]), open = element("button", name), first = element("th");
      open.type = "button";
      open.addEventListener("click", () => choose(name, true));
      first.scope = "row"; first.append(open);
      row.dataset.head = name;
      const line = element("td");
      if (many) line.append(spark(name));
      row.append(first, element("td", run.kind[i]), element("td", short(key(i))), ...(many ? [line] : []));
      return row;
    });
    if (heads.length > MOST_LISTED) { const row = element("tr"); const cell = element("td", `and ${heads.length - MOST_LISTED} more: narrow the search`); cell.colSpan = many ? 4 : 3; row.append(cell); rows.push(row); }
    const thead = element("thead"), body = element("tbody");
    thead.append(top); body.append(...rows);
    $("list").replaceChildren(thead, body);
    markListed();
  }
  function markListed() {
    for (const row of $("list").querySelectorAll("tr[data-head]")) row.classList.toggle("on", row.dataset.head === state.head);
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
      kinds[kind].words = Array.from(take(), (x) => data.runs[r].words[x]);
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
  function drift(points, kind) {
    const t = points[kind].position, n = t.length, mean = t.reduce((sum, x) => sum + x, 0) / n;
    let stt = 0, sa = 0, sb = 0;
    const ma = points[kind].a.reduce((sum, x) => sum + x, 0) / n, mb = points[kind].b.reduce((sum, x) => sum + x, 0) / n;
    t.forEach((x, i) => { stt += (x - mean) ** 2; sa += (x - mean) * points[kind].a[i]; sb += (x - mean) * points[kind].b[i]; });
    if (!stt) return [];
    const at = (x) => [ma + (sa / stt) * (x - mean), mb + (sb / stt) * (x - mean)];
    const [[ax, ay], [x, y]] = [at(Math.min(...t)), at(Math.max(...t))];
    return [{ x, y, ax, ay, xref: "x", yref: "y", axref: "x", ayref: "y", text: "", showarrow: true, arrowhead: 2, arrowwidth: 2.5, arrowcolor: css("--ink") }];
  }
  // Two runs are drawn on the same axes.
  function shared(all, name) {
    const values = all.filter(Boolean).flatMap((points) => [...points.q[name], ...points.k[name]]);
    if (!values.length) return undefined;
    const low = Math.min(...values), high = Math.max(...values), room = 0.05 * (high - low) || 1;
    return [low - room, high + room];
  }
  // Plotly reads some markup in what it shows.
  const quoted = (word) => `“${word.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("\n", "⏎")}”`;
  // Each point is an element of the page, and elements take time: the clouds show these many of each kind.
  const SHOWN = 200;
  function drawCloud(place, points, x, y, title, labels, window, ranges, annotations) {
    const traces = ["q", "k"].map((kind) => {
      const n = points[kind].position.length, some = (column) => (n <= SHOWN ? column : column.filter((_, i) => (i * SHOWN) % n < SHOWN));
      const position = some(points[kind].position), words = some(points[kind].words);
      return {
        type: "scatter", mode: "markers", hoverinfo: "x+y+text", name: kind, x: some(points[kind][x]), y: some(points[kind][y]), text: Array.from(position, (t, i) => `${kind === "q" ? "query" : "key"} at ${Math.round(t)}${words[i] ? `: ${quoted(words[i])}` : ""}`),
        marker: { size: 5, color: position, cmin: 0, cmax: window, colorscale: scaleOf(kind), opacity: 0.75 },
      };
    });
    const axis = (label, range) => ({ title: { text: label, font: { size: 10 } }, zeroline: false, range });
    Plotly.react(place, traces, look({ height: 265, title: { text: title, font: { size: 11 }, x: 0.02, xanchor: "left" }, margin: { l: 46, r: 8, t: 28, b: 36 }, annotations, xaxis: axis(labels[0], ranges[0]), yaxis: axis(labels[1], ranges[1]) }), config);
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
    host.classList.toggle("two", shown.length > 1);
    const all = shown.map((r) => { const i = indexOf[r].get(state.head); return i === undefined ? null : unpack(r, i); });
    const range = Object.fromEntries(["pc0", "pc1", "a", "b"].map((name) => [name, shared(all, name)]));
    const curves = shown.map((r) => (data.distance[r] || [])[indexOf[r].get(state.head)] || []).filter((columns) => columns.length);
    const scores = curves.flatMap((columns) => [...columns[2], ...columns[4]]).filter((x) => x !== null);
    const reach = curves.length ? [Math.log10(Math.min(...curves.map((c) => c[0][0] || 1))) - 0.05, Math.log10(Math.max(...curves.flatMap((c) => c[1]))) + 0.05] : undefined;
    const heights = scores.length ? [Math.min(...scores) - 0.5, Math.max(...scores) + 0.5] : undefined;
    shown.forEach((r, n) => {
      const box = host.children[n], [label, pc, ab, spectrum, rope, distance, plasticity, rings, none] = box.children, i = indexOf[r].get(state.head);
      label.textContent = shown.length > 1 ? data.runs[r].label : "";
      label.hidden = shown.length === 1;
      const points = all[n], window = data.runs[r].window || (points ? Math.max(...points.q.position) : 1);
      pc.hidden = ab.hidden = rings.hidden = points === null;
      none.textContent = points !== null ? "Blue: queries, red: keys; the later the darker; arrows: how their means move. Bars and rings: planes of what is left off a and b, with their share and angle_r; filled bars and ✓ turn with position." : i === undefined ? "This run has no such head." : "No points of this head in the page: qkscope view RUN adds those of every head, qkscope analyze --points those you name.";
      if (points !== null) {
        drawCloud(pc, points, "pc0", "pc1", "principal components", ["PC0", "PC1"], window, [range.pc0, range.pc1], []);
        drawCloud(ab, points, "a", "b", "drift and separation", ["axis a: drift", "axis b: separation"], window, [range.a, range.b], [...drift(points, "q"), ...drift(points, "k")]);
      }
      const planes = (data.planes[r] || [])[i] || [];
      drawSpectrum(spectrum, planes);
      // What is further down the panel is drawn once its top is on the screen.
      const name = state.head;
      requestAnimationFrame(() => setTimeout(() => {
        if (state.head !== name) return;
        drawRope(rope, (data.rope[r] || [])[i] || []);
        drawDistance(distance, (data.distance[r] || [])[i] || [], reach, heights);
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
  function drawDistance(place, columns, reach, heights) {
    place.hidden = columns.length === 0;
    if (!columns.length) return;
    const [low, high, measured, error, predicted] = columns, x = low.map((a, n) => Math.sqrt(a * high[n]));
    // Of an encoder, distances of later keys are negative: open marks, broken lines.
    const traces = [false, true].flatMap((later) => {
      const of = (values) => values.filter((_, n) => low[n] < 0 === later), said = later ? ", later keys" : "";
      if (!of(x).length) return [];
      return [
        { type: "scatter", mode: "markers", name: `measured${said}`, x: of(x), y: of(measured), error_y: { type: "data", array: of(error).map((e) => e || 0), thickness: 1, width: 0 }, marker: { size: 5, color: css("--ink"), symbol: later ? "circle-open" : "circle" } },
        { type: "scatter", mode: "lines", name: `predicted from means${said}`, x: of(x), y: of(predicted), line: { color: "#d2691e", width: 2, dash: later ? "dash" : "solid" } },
      ];
    });
    Plotly.react(place, traces,
      small("mean score at each distance", { type: "log", title: { text: "distance (tokens)", font: { size: 10 } }, range: reach }, { zeroline: false, range: heights }), config);
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
      if (shown.length > 1) row.append(element("td", values.includes(null) ? "–" : short(values[0] - values[1])));
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
  function drawText(i) {
    const run = data.runs[state.run], script = i === undefined ? null : $(`text-${state.run}-${i}`);
    textView.draw($("text"), script, run.tokens, state.text, (chosen) => { state.text = chosen; remember(); drawText(i); });
  }
  function drawHead() {
    const none = state.head === null;
    $("nothing").hidden = !none; $("chosen").hidden = none;
    if (none) return;
    const run = data.runs[state.run], i = indexOf[state.run].get(state.head);
    $("name").textContent = `${run.label} · ${state.head}`;
    const notes = [];
    if (i !== undefined) {
      if (run.kind[i]) notes.push(run.kind[i]);
      if (run.key.length && run.key[i] >= 0) notes.push(`reads key head ${run.key[i]}`);
      if (run.nope.includes(run.layer[i])) notes.push("no rotary encoding in this layer");
      if (run.sliding.includes(run.layer[i])) notes.push("sliding window");
      if (run.flags.length && run.flags[i]) notes.push(`flags: ${run.flags[i]}`);
    }
    $("about").textContent = notes.join(" · ");
    drawText(i);
    drawClouds();
    drawNumbers();
  }
  const narrow = () => matchMedia("(max-width: 60rem)").matches;
  function choose(name, opens) {
    if (!indexOf[state.run].has(name) && !(state.other !== null && indexOf[state.other].has(name))) return;
    if (opens && narrow()) document.body.dataset.sheet = "open";
    const start = performance.now();
    state.head = name;
    drawHead();
    document.body.dataset.headMs = (performance.now() - start).toFixed(1);
    remember();
    markListed();
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

  // ---- links: #l05h13;run=…;vs=…;metric=…;box=…;text=…;find=… -----------------------------------

  function remember() {
    const parts = [state.head || "", `run=${encodeURIComponent(data.runs[state.run].label)}`];
    if (state.other !== null) parts.push(`vs=${encodeURIComponent(data.runs[state.other].label)}`);
    if (data.metrics[state.metric]) parts.push(`metric=${data.metrics[state.metric].column}`);
    if (state.box) parts.push(`box=${state.box.join(",")}`);
    if (state.text.query !== undefined) parts.push(`text=${state.text.query},${state.text.term}`);
    if (state.find.trim()) parts.push(`find=${encodeURIComponent(state.find.trim())}`);
    history.replaceState(null, "", `#${parts.join(";")}`);
  }
  function recall() {
    const [first, ...rest] = location.hash.slice(1).split(";"), missing = [];
    let head = first;
    try { head = decodeURIComponent(first); } catch { /* as it stands */ }
    const find = (label) => { const r = data.runs.findIndex((run) => run.label === label); if (r < 0) missing.push(`run ${label}`); return r < 0 ? null : r; };
    const opening = location.hash.length < 2;
    state.run = data.start.run; state.other = opening ? data.start.other : null; state.metric = numberOf.get(data.first) ?? 0;
    state.head = opening ? data.start.head : null; state.box = null; state.find = ""; state.text = {};
    for (const part of rest) {
      const [key, text] = part.split("=");
      let said = "";
      try { said = decodeURIComponent(text || ""); } catch { continue; }
      if (key === "run") state.run = find(said) ?? data.start.run;
      if (key === "vs") state.other = find(said);
      if (key === "metric") { if (numberOf.has(said)) state.metric = numberOf.get(said); else missing.push(`number ${said}`); }
      if (key === "box") { const box = said.split(",").map(Number); if (box.length === 4 && box.every(Number.isFinite)) state.box = box; }
      if (key === "find") state.find = said;
      if (key === "text") { const [query, term] = said.split(","); if (/^\d{1,4}$/.test(query)) state.text = { query: Number(query), term }; }
    }
    if (/^l\d+h\d+$/.test(head) && data.runs.some((_, r) => indexOf[r].has(head))) state.head = head;
    else if (head) missing.push(`head ${head.slice(0, 40)}`);
    $("missing").textContent = missing.length ? `The link names what is not in this page: ${missing.join(", ")}.` : "";
  }
  function show() {
    $("run").value = String(state.run);
    $("slider").value = String(state.run);
    $("other").value = state.other === null ? "" : String(state.other);
    $("metric").value = String(state.metric);
    if ($("find") !== document.activeElement) $("find").value = state.find;
    const metric = data.metrics[state.metric];
    $("meaning").textContent = metric ? `${metric.column}: ${metric.meaning}${metric.unit ? ` [${metric.unit}]` : ""}` : "";
    const run = data.runs[state.run];
    $("marks").textContent = [run.nope.length ? "∅: no rotary encoding." : "", run.sliding.length ? "≀: sliding window." : ""].join(" ");
    drawMaps();
    drawScatter();
    drawList();
    drawHead();
  }
  function toRun(r) {
    state.run = Math.max(0, Math.min(data.runs.length - 1, r));
    remember(); show();
  }
  let playing = null;
  function play() {
    if (playing !== null) { clearInterval(playing); playing = null; } else {
      if (state.run === data.runs.length - 1) toRun(0);
      playing = setInterval(() => { if (state.run < data.runs.length - 1) toRun(state.run + 1); if (state.run === data.runs.length - 1) play(); }, 900);
    }
    $("play").textContent = playing === null ? "▶" : "⏸";
    $("play").setAttribute("aria-pressed", String(playing !== null));
  }

  // ---- what is seen, as a file ------------------------------------------------------------------

  function save(blob, name) {
    const anchor = element("a");
    anchor.href = URL.createObjectURL(blob); anchor.download = name;
    anchor.click();
    setTimeout(() => URL.revokeObjectURL(anchor.href), 2000);
  }
  const fileName = (ending) => `qkscope-${[data.runs[state.run].label, state.head].filter(Boolean).join("-").replace(/[^\w.-]+/g, "_")}.${ending}`;
  async function picture() {
    const frame = document.querySelector("main").getBoundingClientRect(), parts = [], top = 44;
    for (const plot of document.querySelectorAll("main .js-plotly-plot")) {
      const at = plot.getBoundingClientRect();
      if (!at.width || !at.height) continue;
      const url = await Plotly.toImage(plot, { format: "svg", width: at.width, height: at.height });
      const text = decodeURIComponent(url.slice(url.indexOf(",") + 1));
      parts.push(`<g transform="translate(${(at.left - frame.left).toFixed(1)},${(at.top - frame.top + top).toFixed(1)})">${text.slice(text.indexOf("<svg"))}</g>`);
    }
    for (const canvas of document.querySelectorAll("main canvas")) {
      const at = canvas.getBoundingClientRect();
      if (at.width) parts.push(`<image x="${at.left - frame.left}" y="${at.top - frame.top + top}" width="${at.width}" height="${at.height}" href="${canvas.toDataURL()}"/>`);
    }
    const title = plain([data.runs[state.run].label, state.other === null ? "" : `and ${data.runs[state.other].label}`, state.head || ""].filter(Boolean).join(" · "));
    const width = Math.ceil(frame.width), height = Math.ceil(frame.height) + top;
    const text = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"><rect width="100%" height="100%" fill="${css("--ground")}"/><text x="12" y="28" font-family="sans-serif" font-size="17" fill="${css("--ink")}">${title}</text>${parts.join("")}</svg>`;
    return { text, width, height };
  }
  async function saveSvg() { save(new Blob([(await picture()).text], { type: "image/svg+xml" }), fileName("svg")); }
  async function savePng() {
    const { text, width, height } = await picture(), image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    const canvas = element("canvas");
    canvas.width = 2 * width; canvas.height = 2 * height;
    canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
    canvas.toBlob((blob) => save(blob, fileName("png")));
  }
  function saveCsv() {
    const field = (x) => { const text = x === null || x === undefined ? "" : String(x), safe = typeof x === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text; return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe; };
    const shown = state.other === null ? [state.run] : [state.run, state.other];
    const lines = shown.flatMap((r) => matching(r).heads.map((i) => [data.runs[r].label, data.runs[r].layer[i], data.runs[r].head[i], data.runs[r].kind[i], ...data.metrics.map((_, m) => value(r, m, i))].map(field).join(",")));
    save(new Blob([[["model", "layer", "head", "class", ...data.metrics.map((metric) => metric.column)].join(","), ...lines, ""].join("\n")], { type: "text/csv" }), fileName("csv"));
  }

  fill($("run"), data.runs.map((run) => run.label));
  fill($("other"), data.runs.map((run) => run.label));
  for (const group of [...new Set(data.metrics.map((metric) => metric.group))]) {
    const part = element("optgroup"), own = data.metrics.map((_, m) => m).filter((m) => data.metrics[m].group === group);
    part.label = group;
    fill(part, own.map((m) => `${data.metrics[m].column} – ${brief(data.metrics[m].meaning)}`), own);
    $("metric").append(part);
  }
  $("slider").max = String(data.runs.length - 1);
  $("steps").hidden = data.runs.length < 2;
  // A list that was opened with the mouse gives the arrow keys back to the map.
  let pointed = false;
  addEventListener("pointerdown", () => { pointed = true; }, true);
  addEventListener("keydown", () => { pointed = false; }, true);
  function chosenBy(id, act) {
    $(id).addEventListener("change", (event) => { act(event.target.value); remember(); show(); if (pointed) event.target.blur(); });
  }
  chosenBy("run", (text) => { state.run = Number(text); });
  chosenBy("other", (text) => { state.other = text === "" ? null : Number(text); });
  chosenBy("metric", (text) => { state.metric = Number(text); });
  $("slider").addEventListener("input", (event) => toRun(Number(event.target.value)));
  $("play").addEventListener("click", play);
  $("find").addEventListener("input", (event) => { state.find = event.target.value; remember(); drawMaps(); drawList(); });
  $("find").addEventListener("keydown", (event) => { if (event.key === "Enter") { const first = $("list").querySelector("tr[data-head]"); if (first) choose(first.dataset.head, true); } });
  $("close").addEventListener("click", () => { delete document.body.dataset.sheet; });
  $("link").addEventListener("click", async () => { remember(); try { await navigator.clipboard.writeText(location.href); $("status").textContent = "The link is in the clipboard."; } catch { $("status").textContent = location.href; } });
  $("png").addEventListener("click", savePng);
  $("svg").addEventListener("click", saveSvg);
  $("csv").addEventListener("click", saveCsv);
  $("theme").addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; show(); });
  addEventListener("hashchange", () => { recall(); show(); });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      if (document.body.dataset.sheet) delete document.body.dataset.sheet;
      else { state.box = null; state.find = ""; $("find").value = ""; document.activeElement.blur(); remember(); show(); }
      return;
    }
    if (/^(input|select|textarea)$/i.test(event.target.tagName)) return;
    if (event.key === "[" || event.key === "]") { toRun(state.run + (event.key === "]" ? 1 : -1)); return; }
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (step) { event.preventDefault(); move(...step); }
  });
  recall();
  show();
})();
