"use strict";
// A map of heads by any metric, at one window; a click, a link, the list or the arrow keys open a head.
(() => {
  const $ = (id) => document.getElementById(id);
  const { esc, known, short, signed } = chart;
  const pad = (n) => String(n).padStart(2, "0");
  const nameOf = (layer, head) => `l${pad(layer)}h${pad(head)}`;
  const numbersOf = (name) => name.match(/\d+/g).map(Number);
  const blocks = new Map();
  // What is packed in the page, by its id, unpacked once.
  function bytesOf(id) {
    const script = $(id);
    if (!script) return Promise.resolve(null);
    if (!blocks.has(id)) {
      const packed = Uint8Array.from(atob(script.textContent.trim()), (c) => c.charCodeAt(0));
      blocks.set(id, new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer().then((buffer) => new Uint8Array(buffer)));
    }
    return blocks.get(id);
  }
  const parsed = new Map();
  async function jsonOf(id) {
    if (!parsed.has(id)) parsed.set(id, bytesOf(id).then((bytes) => JSON.parse(new TextDecoder().decode(bytes))));
    return parsed.get(id);
  }

  let data, numberOf, viewAt;
  const state = { run: 0, other: null, window: 0, metric: 0, head: null, tab: "overview", box: null, find: "", sort: "value", down: true, text: {}, from: "" };
  const TABS = ["overview", "planes", "plasticity", "all"];

  function element(kind, text, className) {
    const item = document.createElement(kind);
    if (text !== undefined) item.textContent = text;
    if (className) item.className = className;
    return item;
  }
  const brief = (text, most = 46) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const narrow = () => matchMedia("(max-width: 60rem)").matches;
  const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

  // ---- runs at windows -------------------------------------------------------------------------

  const viewOf = (r, window = state.window) => (r === null ? undefined : viewAt.get(`${r} ${window}`));
  const told = (window) => (window ? `window ${window.toLocaleString("en")}` : "window not known");
  const labelOf = (view) => data.runs[view.run].label;
  // The runs in view, in the order of the study: a difference is the later minus the earlier.
  function seen() {
    const order = [...new Set([state.run, state.other].filter((r) => r !== null))].sort((a, b) => a - b);
    return order.map((r) => viewOf(r)).filter((view) => view !== undefined);
  }
  const main = () => viewOf(state.run) || seen()[0];
  const compares = () => state.other !== null && state.other !== state.run;
  function lacking() {
    return [state.run, ...(compares() ? [state.other] : [])].filter((r) => viewOf(r) === undefined).map((r) => {
      const windows = data.views.filter((view) => view.run === r).map((view) => view.window.toLocaleString("en"));
      return `${data.runs[r].label} was not measured at a window of ${state.window.toLocaleString("en")} tokens, only at ${windows.join(", ")}.`;
    });
  }
  const valueOf = (view, m, i) => (i === undefined ? null : view.values[m][i]);
  const columnOf = (view, column, i) => (numberOf.has(column) ? valueOf(view, numberOf.get(column), i) : null);
  // Effects have the window of the texts that they were measured on: two runs are compared at one only.
  // Heads of models of different shapes have nothing in common but their numbers.
  const sameHeads = (views) => views.every((view) => view.layer.length === views[0].layer.length && view.layer.every((layer, i) => views[0].index.has(nameOf(layer, view.head[i]))));
  const oneText = (views, m) => !data.metrics[m].column.startsWith("effect_") || new Set(views.map((view) => view.effectsWindow)).size === 1;
  const comparable = (views, m) => sameHeads(views) && oneText(views, m);
  function windowOf(view, m) {
    return data.metrics[m] && data.metrics[m].column.startsWith("effect_") && view.effectsWindow ? `texts of ${view.effectsWindow.toLocaleString("en")} tokens` : told(view.window);
  }
  const difference = (a, b) => (known(a) && known(b) ? b - a : null);
  const titled = (metric) => metric.plain || metric.column;

  // ---- the maps --------------------------------------------------------------------------------

  function limits(columns, twoSided) {
    const values = columns.flat().filter(known).sort((a, b) => a - b);
    if (!values.length) return [0, 1];
    // The outermost 1% must not take the colours from all others.
    const at = (p) => values[Math.min(values.length - 1, Math.floor(p * values.length))];
    if (twoSided) { const most = Math.max(Math.abs(at(0.01)), Math.abs(at(0.99))) || 1; return [-most, most]; }
    const low = at(0.01) >= 0 && at(0.01) < 0.5 * at(0.99) ? 0 : at(0.01);
    return [low, at(0.99) === low ? low + 1 : at(0.99)];
  }
  const hasBoth = (metric, columns) => metric.signed && columns.flat().some((x) => known(x) && x < 0);
  function layerName(view) {
    const nope = new Set(view.nope), sliding = new Set(view.sliding);
    return (layer) => `${layer}${nope.has(layer) ? "∅" : ""}${sliding.has(layer) ? "≀" : ""}`;
  }
  function hover(view, i, extra) {
    const lines = [`layer ${view.layer[i]}, head ${view.head[i]}${view.kind[i] ? ` · ${view.kind[i]}` : ""}`, `${labelOf(view)}, ${told(view.window)}`];
    if (extra) lines.push(extra);
    const shown = [data.metrics[state.metric].column, "part_position", "part_content", "decay", "r_q", "r_k"];
    for (const column of new Set(shown)) if (known(columnOf(view, column, i))) lines.push(`${column} ${short(columnOf(view, column, i))}`);
    return lines.join("\n");
  }
  function drawMap(figure, title, at, view, values, range, twoSided, text, width, unit) {
    const layers = Math.max(...view.layer) + 1, heads = Math.max(...view.head) + 1, number = Array.from({ length: layers }, () => Array(heads));
    view.layer.forEach((layer, i) => { number[layer][view.head[i]] = i; });
    const metric = data.metrics[state.metric];
    chart.map(figure, {
      title, at, layers, heads, range, twoSided, width, unit, layerName: layerName(view),
      label: `Map of ${title}, layers by heads, ${at}: from ${short(range[0])} to ${short(range[1])}`,
      value: (l, h) => (number[l][h] === undefined ? undefined : values[number[l][h]]),
      text: (l, h) => text(number[l][h]),
      choose: (l, h) => choose(nameOf(l, h), true),
      data: { columns: ["layer", "head", metric.column], rows: view.layer.map((layer, i) => [layer, view.head[i], values[i]]) },
    });
    figure.view = view;
  }
  function figuresIn(host, count, className = "") {
    while (host.children.length > count || (host.lastChild && host.lastChild.nodeName !== "FIGURE")) host.lastChild.remove();
    while (host.children.length < count) host.append(element("figure", undefined, className));
    return [...host.children];
  }
  // The change of all heads in words.
  function changed(a, b, changes) {
    const there = changes.filter(known), mean = (view) => { const values = view.values[state.metric].filter(known); return values.reduce((sum, x) => sum + x, 0) / values.length; };
    const up = there.filter((x) => x > 0).length, down = there.filter((x) => x < 0).length;
    return `From ${labelOf(a)} to ${labelOf(b)}, both at ${told(b.window)}, ${data.metrics[state.metric].column} rises in ${up} of ${there.length} heads and falls in ${down}; mean over heads ${short(mean(a))} → ${short(mean(b))}.`;
  }
  function drawMaps() {
    const m = state.metric, metric = data.metrics[m], views = seen();
    if (!metric || !views.length) { figuresIn($("maps"), 0); return; }
    const columns = views.map((view) => view.values[m]), twoSided = hasBoth(metric, columns), range = limits(columns, twoSided);
    const both = views.length > 1 && comparable(views, m), places = figuresIn($("maps"), both ? 3 : views.length, "map"), width = views.length > 1 ? 210 : 400;
    $("maps").classList.toggle("three", both);
    views.forEach((view, n) => drawMap(places[n], views.length > 1 ? labelOf(view) : titled(metric), views.length > 1 ? windowOf(view, m) : `${labelOf(view)}, ${windowOf(view, m)}`, view, columns[n], range, twoSided, (i) => hover(view, i), width, metric.unit));
    if (both) {
      const [a, b] = views, changes = b.layer.map((layer, j) => difference(valueOf(a, m, a.index.get(nameOf(layer, b.head[j]))), b.values[m][j]));
      drawMap(places[2], "the later minus the earlier", `${brief(labelOf(b), 24)} − ${brief(labelOf(a), 24)}, ${windowOf(b, m)}; orange: higher in the later`, b, changes, limits([changes], true), true, (i) => hover(b, i, `difference ${signed(changes[i])}`), width, metric.unit);
      $("maps").append(element("p", changed(a, b, changes), "soft"));
    }
    moveMarks();
  }
  function moveMarks() {
    const found = marked();
    for (const figure of $("maps").querySelectorAll("figure")) {
      const names = figure.view.index;
      chart.outline(figure, state.head !== null && names.has(state.head) ? numbersOf(state.head) : null);
      chart.dot(figure, found.filter((name) => names.has(name)).map(numbersOf));
    }
  }

  // ---- the plane of r_q and r_k ----------------------------------------------------------------

  const RUNS = ["var(--run0)", "var(--run1)"];
  function drawScatter() {
    const figure = $("scatter"), views = seen();
    figure.hidden = !numberOf.has("r_q") || !numberOf.has("r_k") || !views.length;
    $("brushing").hidden = figure.hidden;
    if (figure.hidden) return;
    const points = views.flatMap((view) => view.layer.map((layer, i) => ({ x: columnOf(view, "r_q", i), y: columnOf(view, "r_k", i), name: nameOf(layer, view.head[i]), text: hover(view, i) })).filter((p) => known(p.x) && known(p.y)));
    const x = { range: [-0.1, 1.02], title: "r_q: queries on PC0", ticks: [0, 0.3, 0.7, 1] }, y = { range: [-1.05, 1.05], title: "r_k: keys on PC0", ticks: [-1, -0.7, -0.3, 0, 0.3, 0.7, 1] };
    chart.plot(figure, {
      title: "Queries and keys on PC0", at: [...new Set(views.map((view) => told(view.window)))].join(), label: `Correlation with position of queries and of keys, ${points.length} heads`, x, y, width: 400, height: 270, points,
      names: views.length > 1 ? views.map((view, n) => ({ name: brief(labelOf(view), 30), colour: RUNS[n], look: "dot" })) : [],
      draw: (axes) => views.map((view, n) => {
        const in_ = [], out = [];
        view.layer.forEach((_, i) => (state.box && !inBox(view, i) ? out : in_).push(i));
        const spots = (is, style) => chart.spots(is.map((i) => columnOf(view, "r_q", i)), is.map((i) => columnOf(view, "r_k", i)), axes, 6, style);
        return spots(out, `stroke="${RUNS[n]}" stroke-opacity="0.15"`) + spots(in_, `stroke="${RUNS[n]}" stroke-opacity="0.85" data-inside="${in_.length}"`);
      }).join("") + (state.box ? band(state.box, axes) : "") + ring(axes),
      data: { columns: ["model", "layer", "head", "r_q", "r_k"], rows: views.flatMap((view) => view.layer.map((layer, i) => [labelOf(view), layer, view.head[i], columnOf(view, "r_q", i), columnOf(view, "r_k", i)])) },
      choose: (point) => choose(point.name, true), drag: brush,
    });
  }
  function band([x0, x1, y0, y1], { sx, sy }) {
    return `<rect class="band" x="${sx(Math.min(x0, x1))}" y="${sy(Math.max(y0, y1))}" width="${Math.abs(sx(x1) - sx(x0))}" height="${Math.abs(sy(y1) - sy(y0))}" fill="none" stroke="#00a5c4" stroke-width="1.6" stroke-dasharray="3 2"/>`;
  }
  function ring({ sx, sy }) {
    const view = main(), i = state.head === null ? undefined : view.index.get(state.head), x = columnOf(view, "r_q", i), y = columnOf(view, "r_k", i);
    return known(x) && known(y) ? `<circle cx="${sx(x)}" cy="${sy(y)}" r="6.5" fill="none" stroke="#00a5c4" stroke-width="2.5"/>` : "";
  }
  function inBox(view, i) {
    const x = columnOf(view, "r_q", i), y = columnOf(view, "r_k", i), [x0, x1, y0, y1] = state.box;
    return known(x) && known(y) && x >= Math.min(x0, x1) && x <= Math.max(x0, x1) && y >= Math.min(y0, y1) && y <= Math.max(y0, y1);
  }
  function brush(box) {
    state.box = box && box.map((x) => Number(x.toFixed(3)));
    remember();
    drawScatter(); drawList(); moveMarks();
  }

  // ---- finding heads: "l07h00", "class:content", "role:induction", "decay > 1" -------------------

  function matcher(view) {
    const tests = [], none = (problem) => ({ test: () => false, problem });
    const wanted = state.find.toLowerCase().replace(/\s*(>=|<=|>|<|=|:)\s*/g, "$1");
    for (const word of wanted.split(/\s+/).filter(Boolean)) {
      const compared = word.match(/^([a-z_0-9]+)(>=|<=|>|<|=)([-−+]?[\d.]+(?:e[-+]?\d+)?)$/), about = word.match(/^(class|role):(.*)$/);
      if (compared) {
        const [, name, sign, text] = compared, limit = Number(text.replace("−", "-"));
        const own = { layer: (i) => view.layer[i], head: (i) => view.head[i] }[name];
        const column = numberOf.has(name) ? name : data.metrics.map((metric) => metric.column).filter((other) => other.startsWith(name)).sort((a, b) => data.named.includes(b) - data.named.includes(a))[0];
        if (!own && column === undefined) return none(`no number is called ${name}`);
        const read = own || ((i) => columnOf(view, column, i));
        const of = { ">": (x) => x > limit, "<": (x) => x < limit, ">=": (x) => x >= limit, "<=": (x) => x <= limit, "=": (x) => x === limit }[sign];
        tests.push((i) => known(read(i)) && of(read(i)));
      } else if (about) {
        const values = about[1] === "class" ? view.kind : view.role;
        if (!values.length) return none(`these tables have no ${about[1]} of heads`);
        tests.push((i) => values[i].includes(about[2]));
      } else tests.push((i) => nameOf(view.layer[i], view.head[i]).startsWith(word) || view.kind[i].includes(word) || (view.role[i] || "").includes(word));
    }
    return { test: (i) => tests.every((test) => test(i)), problem: "" };
  }
  function matching(view) {
    const { test, problem } = matcher(view), heads = view.layer.map((_, i) => i).filter((i) => test(i) && (!state.box || inBox(view, i)));
    return { heads, problem };
  }
  function marked() {
    const view = main();
    if (!view || (!state.box && !state.find.trim())) return [];
    return matching(view).heads.map((i) => nameOf(view.layer[i], view.head[i]));
  }
  function said(heads, problem, view) {
    if (problem) return `Nothing found: ${problem}.`;
    if (!state.find.trim() && !state.box) return "";
    const what = [state.find.trim() ? `“${state.find.trim()}”` : "", state.box ? "the box" : ""].filter(Boolean).join(" and ");
    return heads.length ? `${heads.length} of ${view.layer.length} heads` : `No head of ${labelOf(view)} at ${told(view.window)} matches ${what}; Esc clears it.`;
  }
  const MOST_LISTED = 300;
  function spark(name) {
    const values = data.runs.map((_, r) => { const view = viewOf(r); return view === undefined ? null : valueOf(view, state.metric, view.index.get(name)); });
    const there = values.filter(known);
    if (there.length < 2) return "";
    const low = Math.min(...there), high = Math.max(...there), x = (r) => (2 + (56 * r) / (values.length - 1)).toFixed(1), y = (v) => (high === low ? 8 : 15 - (14 * (v - low)) / (high - low)).toFixed(1);
    const dots = values.map((v, r) => (known(v) ? `${x(r)},${y(v)}` : null)).filter(Boolean), at = values[state.run];
    return `<svg viewBox="0 0 60 16" class="spark" role="img" aria-label="over the runs: ${values.map(short).join(", ")}"><polyline points="${dots.join(" ")}"/>${known(at) ? `<circle cx="${x(state.run)}" cy="${y(at)}" r="2.2"/>` : ""}</svg>`;
  }
  function drawList() {
    const view = main();
    if (!view) { $("list").replaceChildren(); $("status").textContent = ""; return; }
    const { heads, problem } = matching(view), m = state.metric, views = seen(), both = views.length > 1 && comparable(views, m), sign = state.down ? -1 : 1, many = data.runs.length > 1;
    const changes = both ? views[1].layer.map((layer, j) => difference(valueOf(views[0], m, views[0].index.get(nameOf(layer, views[1].head[j]))), views[1].values[m][j])) : [];
    const changeOf = (i) => (both ? changes[views[1].index.get(nameOf(view.layer[i], view.head[i]))] ?? null : null);
    const key = both && state.sort === "change" ? changeOf : (i) => valueOf(view, m, i);
    heads.sort((a, b) => { const x = key(a), y = key(b); return !known(x) || !known(y) ? !known(x) - !known(y) : sign * (x - y) || a - b; });
    $("status").textContent = said(heads, problem, view);
    const sorter = (name, by) => `<th aria-sort="${state.sort === by ? (state.down ? "descending" : "ascending") : "none"}"><button type="button" data-sort="${by}" title="sort by this, or the other way round">${esc(name)}${state.sort === by ? (state.down ? " ↓" : " ↑") : ""}</button></th>`;
    const rows = heads.slice(0, MOST_LISTED).map((i) => {
      const name = nameOf(view.layer[i], view.head[i]), kind = kinds(view, i).join(" · ");
      return `<tr data-head="${name}"${name === state.head ? ' class="on"' : ""}><th scope="row"><button type="button">${name}</button></th><td>${esc(kind)}</td><td>${short(valueOf(view, m, i))}</td>${both ? `<td>${signed(changeOf(i))}</td>` : ""}${many ? `<td>${spark(name)}</td>` : ""}</tr>`;
    });
    if (heads.length > MOST_LISTED) rows.push(`<tr><td colspan="5">and ${heads.length - MOST_LISTED} more: narrow the search</td></tr>`);
    $("list").innerHTML = `<thead><tr><th>head</th><th>class</th>${data.metrics[m] ? sorter(data.metrics[m].column, "value") : "<th>value</th>"}${both ? sorter("later − earlier", "change") : ""}${many ? "<th>over runs</th>" : ""}</tr></thead><tbody>${rows.join("")}</tbody>`;
  }
  function markListed() {
    for (const row of $("list").querySelectorAll("tr.on")) row.classList.remove("on");
    if (state.head !== null) $("list").querySelector(`tr[data-head="${state.head}"]`)?.classList.add("on");
  }

  // ---- points of a head ------------------------------------------------------------------------

  function unpack(bytes, view, words) {
    if (!bytes) return null;
    const wide = 4, narrow = data.complementAxes, ranges = new Float32Array(bytes.buffer, 0, 2 * (wide + narrow));
    let at = ranges.byteLength;
    const counts = new Uint16Array(bytes.buffer, at, 2), kinds = { q: {}, k: {} };
    at += 4;
    const column = (array, c) => Float32Array.from(array, (x) => ranges[2 * c] + ranges[2 * c + 1] * x);
    [["q", counts[0]], ["k", counts[1]]].forEach(([kind, n]) => {
      const take = () => { const part = new Uint16Array(bytes.buffer, at, n); at += 2 * n; return part; };
      kinds[kind].position = Float32Array.from(take(), (x) => (x / 65535) * view.positions);
      ["pc0", "pc1", "a", "b"].forEach((name, c) => { kinds[kind][name] = column(take(), c); });
      kinds[kind].words = Array.from(take(), (x) => words[x]);
    });
    [["q", counts[0]], ["k", counts[1]]].forEach(([kind, n]) => {
      kinds[kind].svd = Array.from({ length: narrow }, (_, c) => { const part = column(bytes.subarray(at, at + n), wide + c); at += n; return part; });
    });
    return kinds;
  }
  const STOPS = { q: ["#a6cbe6", "#08306b"], k: ["#fcae91", "#67000d"] }, DARK = { q: ["#d6eaf8", "#2f8fe0"], k: ["#ffd9cc", "#f0452d"] };
  const stopsOf = (kind) => (isDark() ? DARK : STOPS)[kind];
  // The mean of a cloud at the first and the last position, by a line through it.
  function drift(points, kind) {
    const { position: t, a, b } = points[kind], n = t.length, mean = (x) => x.reduce((sum, v) => sum + v, 0) / n, mt = mean(t), ma = mean(a), mb = mean(b);
    let stt = 0, sa = 0, sb = 0;
    t.forEach((x, i) => { stt += (x - mt) ** 2; sa += (x - mt) * a[i]; sb += (x - mt) * b[i]; });
    const at = (x) => [ma + (sa / stt) * (x - mt), mb + (sb / stt) * (x - mt)];
    return stt ? [at(Math.min(...t)), at(Math.max(...t))] : null;
  }
  function drawCloud(figure, title, one, x, y, names, ranges) {
    const { view, points } = one, spotted = ["q", "k"].flatMap((kind) => Array.from(points[kind].position, (t, i) => ({ x: points[kind][x][i], y: points[kind][y][i], text: `${kind === "q" ? "query" : "key"} at ${Math.round(t)}${points[kind].words[i] ? `: “${points[kind].words[i].replaceAll("\n", "⏎")}”` : ""}` })));
    chart.plot(figure, {
      title, at: at(one), label: `${title}: ${points.q.position.length} queries in blue and ${points.k.position.length} keys in red, ${names[0]} against ${names[1]}, ${at(one)}`,
      x: { range: ranges[0], title: names[0] }, y: { range: ranges[1], title: names[1] }, points: spotted,
      draw: (axes) => chart.clouds(["q", "k"].map((kind) => ({ x: points[kind][x], y: points[kind][y], share: points[kind].position.map((t) => Math.min(0.999, t / view.positions)), stops: stopsOf(kind) })), axes, 4.6)
        + (x === "a" ? ["q", "k"].map((kind) => drift(points, kind)).filter(Boolean).map(([from, to]) => chart.arrow(from, to, axes)).join("") : ""),
      data: { columns: ["kind", "position", "token", x, y], rows: ["q", "k"].flatMap((kind) => Array.from(points[kind].position, (t, i) => [kind, Math.round(t), points[kind].words[i], points[kind][x][i], points[kind][y][i]])) },
    });
  }

  // ---- the panel of a head ---------------------------------------------------------------------

  const TERMS = ["position", "key", "query", "content"];
  // The run where there are two, and the window.
  const at = (one) => [one.alone ? "" : labelOf(one.view), told(one.view.window)].filter(Boolean).join(", ");
  const together = (ones) => told(ones[0].view.window);
  let turn = 0;
  // Draws the tab that is open, once what it needs is unpacked; an earlier request that comes late is dropped.
  async function drawPanel() {
    const start = performance.now(), mine = (turn += 1), name = state.head, tab = state.tab;
    drawTitle();
    if (name === null) return;
    const views = seen().filter((view) => view.index.has(name)), wantsPoints = tab === "overview" || tab === "planes";
    const ones = await Promise.all(views.map(async (view) => {
      const v = data.views.indexOf(view), i = view.index.get(name);
      const [detail, points, text] = await Promise.all([jsonOf(`detail-${v}`), wantsPoints ? bytesOf(`points-${v}-${i}`) : null, tab === "overview" ? bytesOf(`text-${v}-${i}`) : null]);
      return { view, i, detail, text, points: unpack(points, view, detail.words), alone: views.length < 2 };
    }));
    if (mine !== turn || !ones.length) return;
    for (const other of TABS) { $(`page-${other}`).hidden = other !== tab; const button = $(`tab-${other}`); button.setAttribute("aria-selected", String(other === tab)); button.tabIndex = other === tab ? 0 : -1; }
    ({ overview: drawOverview, planes: drawPlanes, plasticity: drawPlasticity, all: drawNumbers })[tab](ones);
    document.body.dataset.headMs = (performance.now() - start).toFixed(1);
    document.body.dataset.drawn = [name, tab, state.window, state.run, state.other ?? ""].join(";");
  }
  function kinds(view, i) {
    const kind = view.kind[i], role = view.role[i] || "";
    return [kind, role === kind || role === "mixed" ? "" : role].filter(Boolean);
  }
  function drawTitle() {
    const none = state.head === null || !seen().some((view) => view.index.has(state.head)), view = main();
    $("nothing").hidden = !none; $("chosen").hidden = none;
    $("nothing").textContent = state.head !== null && none ? `${seen().length ? "No run in view has" : "No run is in view for"} head ${state.head}.` : "No head chosen yet.";
    if (none) { document.body.dataset.drawn = "none"; return; }
    const own = view.index.has(state.head) ? view : seen().find((one) => one.index.has(state.head)), i = own.index.get(state.head);
    const title = [`layer ${own.layer[i]}, head ${own.head[i]}`, ...kinds(own, i), own.key.length && own.key[i] >= 0 ? `reads key head ${own.key[i]}` : ""];
    $("name").textContent = title.filter(Boolean).join(" · ");
    const shown = seen().map(labelOf), notes = [shown.join(" beside "), told(state.window)];
    if (own.nope.includes(own.layer[i])) notes.push("no rotary encoding in this layer");
    if (own.sliding.includes(own.layer[i])) notes.push("sliding window");
    if (own.flags.length && own.flags[i]) notes.push(`flags: ${own.flags[i]}`);
    if (shown.length > 1 && own.kind[i]) notes.push(`the class is that of ${labelOf(own)}`);
    $("about").textContent = notes.join(" · ");
  }

  function drawText(ones) {
    const sides = ones.map((one) => ({ label: one.alone ? "" : labelOf(one.view), at: told(one.view.window), bytes: one.text, tokens: one.detail.tokens }));
    textView.draw($("text"), sides, state.text, (chosen) => { state.text = chosen; remember(); drawText(ones); });
  }
  function sharedRange(ones, name) {
    return chart.around(ones.filter((one) => one.points).flatMap(({ points }) => [...points.q[name], ...points.k[name]]), 0.05);
  }
  function drawOverview(ones) {
    drawText(ones);
    const kinds = [], host = $("overview"), clouds = ones.filter((one) => one.points);
    if (ones.some((one) => known(columnOf(one.view, "part_position", one.i)))) kinds.push((figure) => drawParts(figure, ones));
    if (ones.some((one) => (one.detail.distance[one.i] || []).length)) kinds.push((figure) => drawDistance(figure, ones));
    const range = Object.fromEntries(["pc0", "pc1", "a", "b"].map((name) => [name, sharedRange(ones, name)]));
    for (const one of clouds) kinds.push((figure) => drawCloud(figure, "Drift and separation", one, "a", "b", ["axis a: drift with position", "axis b: queries from keys"], [range.a, range.b]));
    for (const one of clouds) kinds.push((figure) => drawCloud(figure, "Principal components", one, "pc0", "pc1", ["PC0", "PC1"], [range.pc0, range.pc1]));
    const note = element("p", undefined, "soft");
    figuresIn(host, kinds.length).forEach((figure, n) => kinds[n](figure));
    const without = ones.filter((one) => !one.points).map((one) => labelOf(one.view)), mute = ones.filter((one) => !one.text).map((one) => labelOf(one.view));
    note.textContent = [clouds.length ? "Clouds: queries blue, keys red, the later the darker; arrows: how their means move along the window." : "", without.length ? `No points of this head in the page for ${without.join(", ")} at ${told(state.window)}: qkscope view RUN adds those of every head, qkscope analyze --points those you name.` : "", mute.length && mute.length < ones.length ? `No text for ${mute.join(", ")} at ${told(state.window)}.` : ""].filter(Boolean).join(" ");
    host.append(note);
  }
  function drawParts(figure, ones) {
    const rows = ones.map((one) => ({ name: one.alone ? "" : labelOf(one.view), values: TERMS.map((term) => columnOf(one.view, `part_${term}`, one.i)), text: (v) => (known(v) ? `${Math.round(100 * v)}%`.replace("-", "−") : "–") }));
    const said = rows.map((row) => `${row.name ? `${row.name}: ` : ""}${TERMS.map((term, n) => `${term} ${row.text(row.values[n])}`).join(", ")}`).join("; ");
    chart.parts(figure, {
      title: "What the scores are made of", at: together(ones), label: `Parts of the variance of scores. ${said}`, rows, colours: TERMS.map((term) => ({ name: term, colour: `var(--${term})` })),
      data: { columns: ["model", "window", "term", "part", "low", "high"], rows: ones.flatMap((one, n) => TERMS.map((term, t) => { const ends = one.detail.ends[`part_${term}`]; return [labelOf(one.view), one.view.window, term, rows[n].values[t], ends ? ends[0][one.i] : null, ends ? ends[1][one.i] : null]; })) },
    });
  }
  function drawDistance(figure, ones) {
    const curves = ones.flatMap((one, n) => {
      const [low, high, measured, error, predicted] = one.detail.distance[one.i] || [];
      // Of an encoder, distances of later keys are negative: pale marks, broken lines.
      return low === undefined ? [] : [false, true].map((later) => {
        const of = (values) => values.filter((_, k) => low[k] < 0 === later);
        return { one, n, later, x: of(low.map((a, k) => Math.sqrt(a * high[k]))), measured: of(measured), error: of(error), predicted: of(predicted) };
      }).filter((curve) => curve.x.length);
    });
    const both = new Set(curves.map((curve) => curve.n)).size > 1, colour = (curve) => (both ? RUNS[curve.n] : "var(--ink)"), behind = (curve) => (both ? RUNS[curve.n] : "#d2691e");
    const name = (curve) => `${both ? `${brief(labelOf(curve.one.view), 22)}: ` : ""}measured${curve.later ? ", later keys" : ""}`, xs = curves.flatMap((curve) => curve.x);
    const ends = curves.map((curve) => `${name(curve)} from ${short(curve.measured[0])} to ${short(curve.measured[curve.measured.length - 1])} logits`);
    chart.plot(figure, {
      title: "Mean score by distance", at: together(ones), label: `Mean score at each distance between query and key, ${together(ones)}: ${ends.join("; ")}`,
      x: { log: true, range: [Math.min(...xs) / 1.1, Math.max(...xs) * 1.1], title: "distance (tokens)" }, y: { range: chart.around(curves.flatMap((curve) => [...curve.measured, ...curve.predicted])), title: "logits" },
      draw: (axes) => curves.map((curve) => chart.line(curve.x, curve.predicted, axes, `stroke="${behind(curve)}" stroke-width="5" stroke-opacity="0.4"${curve.later ? ' stroke-dasharray="5 4"' : ""}`) + chart.errors(curve.x, curve.measured, curve.error, axes, `stroke="${colour(curve)}"`) + chart.spots(curve.x, curve.measured, axes, 4.5, `stroke="${colour(curve)}"${curve.later ? ' stroke-opacity="0.5"' : ""}`)).join(""),
      names: [...curves.map((curve) => ({ name: name(curve), colour: colour(curve), look: "dot" })), { name: "predicted from means (band)", colour: both ? "var(--soft)" : "#d2691e" }],
      points: curves.flatMap((curve) => curve.x.map((x, k) => ({ x, y: curve.measured[k], text: `${both ? `${labelOf(curve.one.view)}\n` : ""}distance ${Math.round(x)}: ${short(curve.measured[k])} logits\npredicted ${short(curve.predicted[k])}` }))),
      data: { columns: ["model", "distance", "measured", "measured_se", "predicted"], rows: curves.flatMap((curve) => curve.x.map((x, k) => [labelOf(curve.one.view), curve.later ? -x : x, curve.measured[k], curve.error[k], curve.predicted[k]])) },
    });
  }
  function drawPlasticity(ones) {
    const shown = ones.map((one, n) => ({ one, n, columns: one.detail.plasticity[one.i] || [] })).filter(({ columns }) => columns.length), host = $("plasticity");
    const [figure] = figuresIn(host, 1);
    if (!shown.length) { host.replaceChildren(element("p", "These tables have no plasticity of this head.", "soft")); return; }
    const both = shown.length > 1, colour = (n) => (both ? RUNS[n] : "var(--ink)"), said = (one) => (both ? `${brief(labelOf(one.view), 22)}: ` : "");
    const of = ({ columns: [x, ap, error, published, fixed] }) => ({ x, ap, error, published, fixed, main: fixed.some(known) ? fixed : ap });
    chart.plot(figure, {
      title: "Plasticity along the window", at: together(ones), label: `Attention plasticity by position of the query, ${together(ones)}: ${shown.map((s) => `${said(s.one)}${short(of(s).main.find(known))} first, ${short(of(s).main.findLast(known))} last`).join("; ")}`,
      x: { range: [0, Math.max(...shown.map(({ one }) => one.view.positions))], title: "position of the query" }, y: { range: [0, 1], title: "chance that the query decides which of two keys wins" }, width: 560, height: 240,
      draw: (axes) => shown.map((s) => {
        const c = of(s), ink = colour(s.n), fixed = c.fixed.some(known);
        return (both ? "" : chart.line(c.x, c.published, axes, 'stroke="var(--published)" stroke-width="1.4" stroke-dasharray="4 3"')) + chart.line(c.x, c.ap, axes, `stroke="${ink}" stroke-width="1"${fixed ? ' stroke-opacity="0.5"' : ""}`) + chart.errors(c.x, c.ap, c.error, axes, `stroke="${ink}" stroke-opacity="0.5"`)
          + (fixed ? chart.line(c.x, c.fixed, axes, `stroke="${both ? ink : "var(--fixed)"}" stroke-width="2.2"`) + chart.spots(c.x, c.fixed, axes, 5, `stroke="${both ? ink : "var(--fixed)"}"`) : "");
      }).join(""),
      names: shown.flatMap((s) => [...(of(s).fixed.some(known) ? [{ name: `${said(s.one)}with queries turned to one place`, colour: both ? colour(s.n) : "var(--fixed)", look: "line" }] : []), { name: `${said(s.one)}as they are (thin)`, colour: colour(s.n), look: "line" }, ...(both ? [] : [{ name: "published formula", colour: "var(--published)", look: "dash" }])]),
      points: shown.flatMap((s) => of(s).x.map((x, k) => ({ x, y: of(s).main[k], text: `${said(s.one)}query at ${Math.round(x)}\nin one place ${short(of(s).fixed[k])}\nas it is ${short(of(s).ap[k])}\npublished ${short(of(s).published[k])}` }))),
      data: { columns: ["model", "q_position", "ap", "ap_se", "ap_published", "ap_fixed"], rows: shown.flatMap(({ one, columns }) => columns[0].map((_, k) => [labelOf(one.view), ...columns.map((column) => column[k])])) },
    });
  }
  function drawPlanes(ones) {
    const host = $("page-planes");
    host.classList.toggle("two", ones.length > 1);
    while (host.children.length > ones.length) host.lastChild.remove();
    while (host.children.length < ones.length) { const side = element("div", undefined, "side"); side.append(element("h3"), element("figure"), element("div", undefined, "rings"), element("figure"), element("p", undefined, "soft")); host.append(side); }
    const most = Math.max(...ones.flatMap((one) => (one.detail.planes[one.i] || []).map((plane) => plane[0])), 1e-6);
    ones.forEach((one, n) => {
      const [label, spectrum, rings, rope, note] = host.children[n].children, planes = one.detail.planes[one.i] || [], columns = one.detail.rope[one.i] || [];
      label.textContent = [labelOf(one.view), told(one.view.window)].join(" · ");
      spectrum.hidden = !planes.length; rope.hidden = !columns.length; rings.hidden = !one.points;
      if (planes.length) drawSpectrum(spectrum, one, planes, most);
      if (one.points) drawRings(rings, one, planes); else rings.replaceChildren();
      if (columns.length) drawRope(rope, one, columns);
      note.textContent = planes.length || columns.length || one.points ? "Bars and small clouds: planes of what is left off axes a and b, each with its share and angle_r; filled bars and ✓ turn with position." : "These tables have no planes of this head.";
    });
  }
  function drawSpectrum(figure, one, planes, most) {
    chart.plot(figure, {
      title: "Share of each plane of the complement", at: at(one), label: `Share of variance of ${planes.length} planes, ${planes.filter((plane) => plane[3]).length} of which turn with position, ${at(one)}`, height: 170,
      x: { range: [-0.7, planes.length - 0.3], title: "plane" }, y: { range: [0, 1.05 * most], format: (v) => `${Number((100 * v).toPrecision(3))}%` },
      draw: ({ sx, sy }) => planes.map((plane, p) => `<rect x="${sx(p - 0.4).toFixed(1)}" y="${sy(plane[0]).toFixed(1)}" width="${(sx(0.8) - sx(0)).toFixed(1)}" height="${(sy(0) - sy(plane[0])).toFixed(1)}" fill="${plane[3] ? "#7b5aa6" : "var(--line)"}"/>`).join(""),
      points: planes.map((plane, p) => ({ x: p, y: plane[0] / 2, text: `plane ${p}: share ${short(plane[0])}\nangle_r ${short(plane[1])}\n${short(plane[2])} radians per token` })),
      data: { columns: ["plane", "var_share", "angle_r", "frequency", "active"], rows: planes.map((plane, p) => [p, ...plane]) },
    });
  }
  function drawRings(host, one, planes) {
    const { points, view } = one, count = Math.min(points.q.svd.length / 2, planes.length || 6);
    figuresIn(host, count).forEach((figure, p) => {
      const [u, v] = [2 * p, 2 * p + 1], most = Math.max(...["q", "k"].flatMap((kind) => [...points[kind].svd[u], ...points[kind].svd[v]].map(Math.abs))) || 1, told_ = planes[p];
      const to = chart.scale({ range: [-most, most] }, 4, 96), name = told_ ? `${p}: ${(100 * told_[0]).toFixed(1)}%, ${told_[1] < 0 ? "−" : ""}${Math.abs(told_[1]).toFixed(2)}${told_[3] ? " ✓" : ""}` : `plane ${p}`;
      chart.fill(figure, {
        title: name, width: 100, height: 100, label: `Queries and keys on plane ${name}, ${at(one)}`,
        svg: chart.clouds(["q", "k"].map((kind) => ({ x: points[kind].svd[u], y: points[kind].svd[v], share: points[kind].position.map((t) => Math.min(0.999, t / view.positions)), stops: stopsOf(kind) })), { sx: to, sy: (y) => 100 - to(y) }, 2.6),
        data: { columns: ["kind", "position", `svd_${u}`, `svd_${v}`], rows: ["q", "k"].flatMap((kind) => Array.from(points[kind].position, (t, i) => [kind, Math.round(t), points[kind].svd[u][i], points[kind].svd[v][i]])) },
      });
    });
  }
  function drawRope(figure, one, columns) {
    const [cycles, share, lockQ, lockK, bias] = columns, xs = cycles.map((_, p) => p), lines = [["variance", share, "#5b7553"], ["lock of queries", lockQ, "#2b7bba"], ["lock of keys", lockK, "#d6402b"]];
    chart.plot(figure, {
      title: "RoPE planes, fastest first", at: at(one), label: `Shares of bias and variance, and phase locks, of ${xs.length} RoPE planes, ${at(one)}`,
      x: { range: [-0.7, xs.length - 0.3], title: "plane" }, y: { range: [0, 1], title: "share, or lock" },
      draw: (axes) => xs.map((p) => (known(bias[p]) ? `<rect x="${axes.sx(p - 0.4).toFixed(1)}" y="${axes.sy(bias[p]).toFixed(1)}" width="${(axes.sx(0.8) - axes.sx(0)).toFixed(1)}" height="${(axes.sy(0) - axes.sy(bias[p])).toFixed(1)}" fill="#c98b2b"/>` : "")).join("") + lines.map(([, ys, colour]) => chart.line(xs, ys, axes, `stroke="${colour}" stroke-width="1.5"`) + chart.spots(xs, ys, axes, 4, `stroke="${colour}"`)).join(""),
      names: [{ name: "bias", colour: "#c98b2b" }, ...lines.map(([name, , colour]) => ({ name, colour, look: "line" }))],
      points: xs.map((p) => ({ x: p, y: lockK[p], text: `plane ${p}: ${short(cycles[p])} turns over the window\nvariance ${short(share[p])}, bias ${short(bias[p])}\nlock of queries ${short(lockQ[p])}, of keys ${short(lockK[p])}` })),
      data: { columns: ["plane", "cycles", "var_share", "lock_q", "lock_k", "bias_share"], rows: xs.map((p) => [p, ...columns.map((column) => column[p])]) },
    });
  }
  function drawNumbers(ones) {
    const two = ones.length > 1, heads = two ? [...ones.map((one) => labelOf(one.view)), "later − earlier"] : ["value", "95% interval"];
    const rows = data.metrics.map((metric, m) => {
      const values = ones.map((one) => valueOf(one.view, m, one.i)), [one] = ones, ends = one.detail.ends[metric.column];
      const last = two ? (comparable(ones.map((o) => o.view), m) ? signed(difference(...values)) : "–") : ends && known(ends[0][one.i]) ? `${short(ends[0][one.i])} … ${short(ends[1][one.i])}` : "";
      return `<tr><th scope="row">${esc(metric.column)}<span>${esc(metric.meaning + (metric.unit ? ` [${metric.unit}]` : ""))}${metric.column.startsWith("effect_") ? esc(`, on ${[...new Set(ones.map((o) => windowOf(o.view, m)))].join(" and ")}`) : ""}</span></th>${values.map((v) => `<td>${short(v)}</td>`).join("")}<td>${last}</td></tr>`;
    });
    $("numbers").innerHTML = `<caption class="soft">${esc(told(state.window))}</caption><thead><tr><th>number and meaning</th>${heads.map((name) => `<th>${esc(name)}</th>`).join("")}</tr></thead><tbody>${rows.join("")}</tbody>`;
  }

  // ---- choosing ----------------------------------------------------------------------------------

  function choose(name, opens) {
    if (!seen().some((view) => view.index.has(name))) return;
    if (opens && narrow()) document.body.dataset.sheet = "open";
    state.head = name;
    remember();
    markListed(); moveMarks();
    const done = drawPanel();
    // Once the head is on the screen, move its ring.
    requestAnimationFrame(() => setTimeout(drawScatter, 0));
    return done;
  }
  function move(down, right) {
    const view = main();
    if (!view) return;
    if (state.head === null) { choose(nameOf(view.layer[0], view.head[0])); return; }
    const i = view.index.get(state.head) ?? 0, layers = [...new Set(view.layer)].sort((a, b) => a - b);
    const nearest = (list, want) => list.reduce((best, x) => (Math.abs(x - want) < Math.abs(best - want) ? x : best));
    const headsOf = (layer) => view.head.filter((_, j) => view.layer[j] === layer).sort((a, b) => a - b);
    const row = layers.indexOf(view.layer[i]), layer = layers[Math.max(0, Math.min(layers.length - 1, row + down))];
    const heads = headsOf(layer), here = heads.indexOf(nearest(heads, view.head[i]));
    choose(nameOf(layer, heads[Math.max(0, Math.min(heads.length - 1, here + right))]));
  }
  function openTab(tab) {
    state.tab = tab;
    remember();
    drawPanel();
  }

  // ---- links: #l05h13;run=…;vs=…;at=…;metric=…;tab=…;box=…;text=…;find=…;from=… ------------------

  function remember() {
    const parts = [state.head || "", `run=${encodeURIComponent(data.runs[state.run].label)}`];
    if (compares()) parts.push(`vs=${encodeURIComponent(data.runs[state.other].label)}`);
    if (state.window) parts.push(`at=${state.window}`);
    if (data.metrics[state.metric]) parts.push(`metric=${data.metrics[state.metric].column}`);
    if (state.tab !== "overview") parts.push(`tab=${state.tab}`);
    if (state.sort !== "value" || !state.down) parts.push(`sort=${state.sort},${state.down ? "down" : "up"}`);
    if (state.box) parts.push(`box=${state.box.join(",")}`);
    if (state.text.query !== undefined) parts.push(`text=${state.text.query},${state.text.term}`);
    if (state.find.trim()) parts.push(`find=${encodeURIComponent(state.find.trim())}`);
    if (state.from) parts.push(`from=${state.from}`);
    history.replaceState(null, "", `#${parts.join(";")}`);
  }
  function recall() {
    const [first, ...rest] = location.hash.slice(1).split(";"), missing = [], opening = location.hash.length < 2;
    let head = first, window = null;
    try { head = decodeURIComponent(first); } catch { /* as it stands */ }
    const find = (label) => { const r = data.runs.findIndex((run) => run.label === label); if (r < 0) missing.push(`run ${label}`); return r < 0 ? null : r; };
    Object.assign(state, { run: data.start.run, other: opening ? data.start.other : null, metric: numberOf.get(data.first) ?? 0, head: opening ? data.start.head : null, tab: "overview", box: null, find: "", sort: "value", down: true, text: {}, from: "" });
    for (const part of rest) {
      const [key, text] = part.split("=");
      let said_ = "";
      try { said_ = decodeURIComponent(text || ""); } catch { continue; }
      if (key === "run") state.run = find(said_) ?? data.start.run;
      if (key === "vs") state.other = find(said_);
      if (key === "at") { if (data.windows.includes(Number(said_))) window = Number(said_); else missing.push(`window ${said_}`); }
      if (key === "metric") { if (numberOf.has(said_)) state.metric = numberOf.get(said_); else missing.push(`number ${said_}`); }
      if (key === "tab" && TABS.includes(said_)) state.tab = said_;
      if (key === "sort") { const [by, way] = said_.split(","); state.sort = by === "change" ? by : "value"; state.down = way !== "up"; }
      if (key === "box") { const box = said_.split(",").map(Number); if (box.length === 4 && box.every(Number.isFinite)) state.box = box; }
      if (key === "find") state.find = said_;
      if (key === "text") { const [query, term] = said_.split(","); if (/^\d{1,4}$/.test(query)) state.text = { query: Number(query), term }; }
      if (key === "from" && /^[\w-]{1,60}$/.test(said_)) state.from = said_;
    }
    if (state.other === state.run) state.other = null;
    state.window = window ?? windowFor();
    if (/^l\d+h\d+$/.test(head) && data.views.some((view) => view.index.has(head))) state.head = head;
    else if (head) missing.push(`head ${head.slice(0, 40)}`);
    $("missing").dataset.link = missing.length ? `The link names what is not in this page: ${missing.join(", ")}.` : "";
  }
  // The page's own window if the runs have it, else the largest that they share, else the first of the run.
  function windowFor() {
    const windows = (r) => data.views.filter((view) => view.run === r).map((view) => view.window);
    const common = windows(state.run).filter((window) => !compares() || windows(state.other).includes(window));
    return common.includes(data.start.window) ? data.start.window : common.length ? Math.max(...common) : windows(state.run)[0];
  }
  function show() {
    $("run").value = $("slider").value = String(state.run);
    $("other").value = state.other === null ? "" : String(state.other);
    $("window").value = String(state.window);
    showMetric();
    if ($("find") !== document.activeElement) $("find").value = state.find;
    const metric = data.metrics[state.metric], views = seen();
    $("meaning").textContent = metric ? `${metric.column}: ${metric.meaning}${metric.unit ? ` [${metric.unit}]` : ""}` : "";
    const apart = views.length > 1 && !sameHeads(views) ? ["These runs do not have the same heads, so no difference is drawn: a head of one is not the head of that number of the other."]
      : views.length > 1 && metric && !oneText(views, state.metric) ? ["The effects of these runs were measured on texts of different lengths, so no difference is drawn."] : [];
    $("missing").textContent = [$("missing").dataset.link, ...lacking(), ...apart].filter(Boolean).join(" ");
    $("marks").textContent = [views.some((view) => view.nope.length) ? "∅: no rotary encoding." : "", views.some((view) => view.sliding.length) ? "≀: sliding window." : ""].join(" ");
    $("back").href = state.from && data.report ? `${data.report}#${state.from}` : data.report;
    $("back").textContent = state.from ? "← back to the finding" : "Report";
    drawMaps(); drawScatter(); drawList();
    return drawPanel();
  }
  function toRun(r) {
    state.run = Math.max(0, Math.min(data.runs.length - 1, r));
    if (state.other === state.run) state.other = null;
    remember();
    return show();
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

  // ---- what is seen, as a file -------------------------------------------------------------------

  function save(blob, name) {
    const anchor = element("a");
    anchor.href = URL.createObjectURL(blob); anchor.download = name;
    anchor.click();
    setTimeout(() => URL.revokeObjectURL(anchor.href), 2000);
  }
  const fileName = (ending, more = "") => `qkscope-${[data.runs[state.run].label, state.head, more].filter(Boolean).join("-").replace(/[^\w.-]+/g, "_")}.${ending}`;
  // The page as it is on the screen: a copy inside an SVG, with what was typed, chosen and scrolled.
  function screen() {
    const copy = document.body.cloneNode(true), those = (root) => root.querySelectorAll("select, input, .maps, .list, .panel, .scroll, .passage");
    const own = [...those(document.body)];
    those(copy).forEach((item, n) => {
      if (own[n].tagName === "SELECT") for (const option of item.options) option.toggleAttribute("selected", option.value === own[n].value);
      else if (own[n].tagName === "INPUT") item.setAttribute("value", own[n].value);
      else {
        item.style.overflow = "hidden";
        for (const child of item.children) if (own[n].scrollTop || own[n].scrollLeft) child.style.transform = `translate(${-own[n].scrollLeft}px, ${-own[n].scrollTop}px)`;
      }
    });
    copy.querySelectorAll("script, #tip").forEach((item) => item.remove());
    const width = document.documentElement.clientWidth, height = innerHeight, theme = isDark() ? "dark" : "light";
    const maps = document.querySelector(".maps").getBoundingClientRect(), frame = document.querySelector("main").getBoundingClientRect();
    // What sticks to the screen would stick to nothing in a picture.
    const stuck = copy.querySelector(".maps");
    if (maps.top > frame.top) { stuck.style.position = "relative"; stuck.style.top = `${maps.top - frame.top}px`; } else stuck.style.position = "static";
    copy.style.cssText += `;width:${width}px;margin:${-scrollY}px 0 0 0;background:none`;
    // A picture has no pointer, so what shows only under one is left out.
    const still = matchMedia("(hover: hover)").matches ? ".files { display: none !important; } figcaption { padding-right: 0 !important; }" : "";
    const style = `${[...document.querySelectorAll("style")].map((item) => item.textContent).join("\n")}\n${still}`;
    const inner = new XMLSerializer().serializeToString(copy);
    return { width, height, text: `<svg xmlns="http://www.w3.org/2000/svg" data-theme="${theme}" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"><style>${esc(style)}</style><rect width="100%" height="100%" fill="${chart.css("--ground")}"/><foreignObject width="${width}" height="${height}">${inner}</foreignObject></svg>` };
  }
  async function savePng() {
    const { width, height, text } = screen(), image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    const canvas = element("canvas");
    canvas.width = 2 * width; canvas.height = 2 * height;
    canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
    canvas.toBlob((blob) => save(blob, fileName("png")));
  }
  function saveCsv() {
    const rows = seen().flatMap((view) => matching(view).heads.map((i) => [labelOf(view), view.window, view.layer[i], view.head[i], view.kind[i], ...data.metrics.map((_, m) => valueOf(view, m, i))]));
    save(new Blob([chart.asCsv({ columns: ["model", "window", "layer", "head", "class", ...data.metrics.map((metric) => metric.column)], rows })], { type: "text/csv" }), fileName("csv"));
  }
  function saveFigure(figure, kind) {
    const name = fileName(kind, chart.of(figure).title);
    if (kind === "svg") save(new Blob([chart.asSvg(figure)], { type: "image/svg+xml" }), name);
    else save(new Blob([chart.asCsv(chart.of(figure).data)], { type: "text/csv" }), name);
  }

  // ---- controls ----------------------------------------------------------------------------------

  function fill(select, names, values) {
    names.forEach((name, i) => { const item = element("option", name); item.value = String(values ? values[i] : i); select.append(item); });
  }
  const MORE = "more";
  function fillMetrics(all) {
    const select = $("metric");
    select.replaceChildren();
    const named = data.named.map((column) => numberOf.get(column));
    fill(select, named.map((m) => `${data.metrics[m].plain} · ${data.metrics[m].column}`), named);
    if (!all && named.length) { fill(select, ["more…"], [MORE]); return; }
    for (const group of [...new Set(data.metrics.map((metric) => metric.group))]) {
      const part = element("optgroup"), own = data.metrics.map((_, m) => m).filter((m) => data.metrics[m].group === group && !named.includes(m));
      part.label = group;
      fill(part, own.map((m) => `${data.metrics[m].column} – ${brief(data.metrics[m].meaning)}`), own);
      if (own.length) select.append(part);
    }
  }
  function showMetric() {
    const select = $("metric");
    if (![...select.options].some((option) => option.value === String(state.metric))) fillMetrics(true);
    select.value = String(state.metric);
  }
  function listen() {
    // A list that was opened with the mouse gives the arrow keys back to the map.
    let pointed = false;
    addEventListener("pointerdown", () => { pointed = true; }, true);
    addEventListener("keydown", () => { pointed = false; }, true);
    function chosenBy(id, act) {
      $(id).addEventListener("change", (event) => { act(event.target.value); remember(); show(); if (pointed) event.target.blur(); });
    }
    chosenBy("run", (text) => { state.run = Number(text); if (state.other === state.run) state.other = null; });
    chosenBy("other", (text) => { state.other = text === "" || Number(text) === state.run ? null : Number(text); });
    chosenBy("window", (text) => { state.window = Number(text); });
    $("metric").addEventListener("change", (event) => {
      if (event.target.value === MORE) { fillMetrics(true); $("metric").value = String(state.metric); $("status").textContent = "All numbers are in the list now."; return; }
      state.metric = Number(event.target.value); remember(); show();
      if (pointed) event.target.blur();
    });
    $("slider").addEventListener("input", (event) => toRun(Number(event.target.value)));
    $("play").addEventListener("click", play);
    $("find").addEventListener("input", (event) => { state.find = event.target.value; remember(); drawList(); moveMarks(); });
    $("find").addEventListener("keydown", (event) => { if (event.key === "Enter") { const first = $("list").querySelector("tr[data-head]"); if (first) choose(first.dataset.head, true); } });
    $("list").addEventListener("click", (event) => {
      const sort = event.target.closest("[data-sort]"), row = event.target.closest("tr[data-head]");
      if (sort) {
        if (state.sort === sort.dataset.sort) state.down = !state.down; else state.sort = sort.dataset.sort;
        remember(); drawList();
        $("list").querySelector(`[data-sort="${state.sort}"]`).focus();
      } else if (row) choose(row.dataset.head, true);
    });
    document.querySelector(".tabs").addEventListener("click", (event) => { if (event.target.dataset.tab) openTab(event.target.dataset.tab); });
    document.querySelector(".tabs").addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault(); event.stopPropagation();
      openTab(TABS[(TABS.indexOf(state.tab) + step + TABS.length) % TABS.length]);
      $(`tab-${state.tab}`).focus();
    });
    $("close").addEventListener("click", () => { delete document.body.dataset.sheet; });
    $("link").addEventListener("click", async () => { remember(); try { await navigator.clipboard.writeText(location.href); $("status").textContent = "The link is in the clipboard."; } catch { $("status").textContent = location.href; } });
    $("png").addEventListener("click", savePng);
    $("csv").addEventListener("click", saveCsv);
    $("theme").addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; show(); });
    listenToFigures();
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
  }
  // What stands under the pointer, a click on it, a box drawn over it, and the buttons of every figure.
  function listenToFigures() {
    const tip = $("tip"), figureAt = (event) => { const drawing = event.target.closest("figure.chart > svg"); return drawing && drawing.parentElement; };
    let dragged = null;
    const value = (axis, at, from, to) => axis[0] + ((at - from) / (to - from)) * (axis[1] - axis[0]);
    const inUnits = (figure, [x, y]) => {
      const { room } = chart.of(figure).drag, clip = (v, a, b) => Math.max(Math.min(a, b), Math.min(Math.max(a, b), v));
      return [value([-0.1, 1.02], clip(x, room.left, room.right), room.left, room.right), value([-1.05, 1.05], clip(y, room.top, room.bottom), room.bottom, room.top)];
    };
    document.addEventListener("pointermove", (event) => {
      const figure = figureAt(event), one = figure && chart.of(figure), text = one && one.under && !dragged ? one.under(...chart.place(figure, event)) : null;
      tip.hidden = !text;
      if (figure && one.choose) figure.style.cursor = text ? "pointer" : "";
      if (text) {
        tip.textContent = text;
        tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
        tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
      }
      if (dragged) {
        dragged.to = inUnits(dragged.figure, chart.place(dragged.figure, event));
        const box = [dragged.from[0], dragged.to[0], dragged.from[1], dragged.to[1]];
        dragged.figure.querySelector(".band")?.remove();
        dragged.figure.querySelector("svg").insertAdjacentHTML("beforeend", band(box, chart.of(dragged.figure).drag.axes));
      }
    });
    document.addEventListener("pointerdown", (event) => {
      const figure = figureAt(event);
      if (figure && chart.of(figure).drag && event.button === 0) { dragged = { figure, from: inUnits(figure, chart.place(figure, event)), to: null }; event.preventDefault(); }
    });
    document.addEventListener("pointerup", () => {
      const { figure, from, to } = dragged || {};
      dragged = null;
      if (to && Math.abs(to[0] - from[0]) + Math.abs(to[1] - from[1]) > 0.03) { chart.of(figure).drag.done([from[0], to[0], from[1], to[1]]); }
    });
    document.addEventListener("dblclick", (event) => { const figure = figureAt(event); if (figure && chart.of(figure).drag && state.box) brush(null); });
    document.addEventListener("click", (event) => {
      const button = event.target.closest("[data-save]"), figure = figureAt(event);
      if (button) saveFigure(button.closest("figure"), button.dataset.save);
      else if (figure && chart.of(figure).choose) chart.of(figure).choose(...chart.place(figure, event));
    });
  }

  (async () => {
    data = await jsonOf("core");
    numberOf = new Map(data.metrics.map((metric, m) => [metric.column, m]));
    viewAt = new Map(data.views.map((view) => [`${view.run} ${view.window}`, view]));
    for (const view of data.views) view.index = new Map(view.layer.map((layer, i) => [nameOf(layer, view.head[i]), i]));
    fill($("run"), data.runs.map((run) => run.label));
    fill($("other"), data.runs.map((run) => run.label));
    fill($("window"), data.windows.map((window) => (window ? `${window.toLocaleString("en")} tokens` : "not known")), data.windows);
    fillMetrics(false);
    $("slider").max = String(data.runs.length - 1);
    $("steps").hidden = data.runs.length < 2;
    listen();
    recall();
    await show();
    document.body.dataset.ready = "yes";
  })();
})();
