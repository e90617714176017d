"use strict";
// Small charts as SVG: maps of cells, clouds of points, curves and bars, with axes, a label for readers of the screen,
// what stands under the pointer, and their data. Everything a user named is escaped.
const chart = (() => {
  const esc = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const known = (x) => x !== null && x !== undefined && Number.isFinite(x);
  const px = (x) => Math.round(10 * x) / 10;
  function short(x) {
    if (!known(x)) return "–";
    const size = Math.abs(x);
    return (size !== 0 && (size < 1e-3 || size >= 1e5) ? x.toExponential(1) : Number(x.toPrecision(3)).toString()).replace("-", "−");
  }
  const signed = (x) => (known(x) && x > 0 ? `+${short(x)}` : short(x));

  // ---- colours: those of the report's maps -----------------------------------------------------

  const DIVERGING = ["#2d004b", "#542788", "#8073ac", "#b2abd2", "#d8daeb", "#f7f7f7", "#fee0b6", "#fdb863", "#e08214", "#b35806", "#7f3b08"]; // PuOr_r: positive is orange
  const ONE_SIDED = ["#ffffe5", "#fff7bc", "#fee391", "#fec44f", "#fe9929", "#ec7014", "#cc4c02", "#993404", "#662506"]; // YlOrBr
  const part = (colour, at) => parseInt(colour.slice(at, at + 2), 16);
  function mixed(stops, share) {
    const at = Math.max(0, Math.min(1, share)) * (stops.length - 1), n = Math.min(stops.length - 2, Math.floor(at)), rest = at - n;
    return `#${[1, 3, 5].map((c) => Math.round(part(stops[n], c) * (1 - rest) + part(stops[n + 1], c) * rest).toString(16).padStart(2, "0")).join("")}`;
  }

  // ---- axes ------------------------------------------------------------------------------------

  // Around what is known, with some room; a range without width gets one.
  function around(values, room = 0.06) {
    let low = Infinity, high = -Infinity;
    for (const x of values) if (known(x)) { if (x < low) low = x; if (x > high) high = x; }
    if (low > high) return [0, 1];
    const more = (high - low) * room || Math.abs(high) * 0.1 || 1;
    return [low - more, high + more];
  }
  function steps([low, high], most) {
    const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= raw);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n += 1) found.push(n * step);
    return found;
  }
  function decades([low, high]) {
    const found = [];
    for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) for (const n of high / low < 30 ? [1, 2, 5] : [1]) if (n * power >= low && n * power <= high) found.push(n * power);
    return found;
  }
  // Where a value stands between two ends of the drawing.
  function scale({ range, log }, from, to) {
    const by = log ? Math.log : (x) => x, low = by(range[0]), high = by(range[1]);
    return (x) => from + ((by(x) - low) / (high - low || 1)) * (to - from);
  }
  const thousands = (x) => (Math.abs(x) >= 1000 ? x.toLocaleString("en") : String(Number(x.toPrecision(6))).replace("-", "−"));
  function frame(box, x, y) {
    const sx = scale(x, box.left, box.right), sy = scale(y, box.bottom, box.top), tell = (axis) => axis.format || thousands, lines = [];
    for (const t of y.ticks || (y.log ? decades(y.range) : steps(y.range, 4))) lines.push(`<path d="M${box.left} ${px(sy(t))}H${box.right}" stroke="var(--line)"/><text x="${box.left - 5}" y="${px(sy(t) + 3.5)}" text-anchor="end">${esc(tell(y)(t))}</text>`);
    for (const t of x.ticks || (x.log ? decades(x.range) : steps(x.range, 5))) lines.push(`<path d="M${px(sx(t))} ${box.bottom}v4" stroke="var(--soft)"/><text x="${px(sx(t))}" y="${box.bottom + 15}" text-anchor="middle">${esc(tell(x)(t))}</text>`);
    lines.push(`<path d="M${box.left} ${box.bottom}H${box.right}" stroke="var(--soft)"/>`);
    if (y.range[0] < 0 && y.range[1] > 0) lines.push(`<path d="M${box.left} ${px(sy(0))}H${box.right}" stroke="var(--soft)" stroke-dasharray="2 3"/>`);
    if (x.title) lines.push(`<text x="${box.right}" y="${box.bottom + 29}" text-anchor="end">${esc(x.title)}</text>`);
    if (y.title) lines.push(`<text x="2" y="${box.top - 6}">${esc(y.title)}</text>`);
    return { sx, sy, svg: lines.join("") };
  }

  // ---- marks -----------------------------------------------------------------------------------

  function line(xs, ys, { sx, sy }, style) {
    let d = "", pen = "M";
    xs.forEach((x, n) => { if (known(x) && known(ys[n])) { d += `${pen}${px(sx(x))} ${px(sy(ys[n]))}`; pen = "L"; } else pen = "M"; });
    return `<path d="${d}" fill="none" ${style}/>`;
  }
  // All points of one colour are one path, of strokes without length: elements take time.
  function spots(xs, ys, { sx, sy }, size, style) {
    let d = "";
    for (let n = 0; n < xs.length; n += 1) if (known(xs[n]) && known(ys[n])) d += `M${px(sx(xs[n]))} ${px(sy(ys[n]))}h0`;
    return `<path class="spots" d="${d}" fill="none" stroke-width="${size}" stroke-linecap="round" ${style}/>`;
  }
  function errors(xs, ys, es, { sx, sy }, style) {
    let d = "";
    xs.forEach((x, n) => { if (known(x) && known(ys[n]) && es[n]) d += `M${px(sx(x))} ${px(sy(ys[n] - es[n]))}V${px(sy(ys[n] + es[n]))}`; });
    return `<path d="${d}" fill="none" ${style}/>`;
  }
  const SHADES = 12;
  // Clouds of several kinds, pale to strong by a share between 0 and 1; kinds alternate, so that none hides another.
  function clouds(kinds, at, size) {
    const found = [];
    kinds.forEach(({ x, y, share, stops }) => {
      const ds = Array(SHADES).fill("");
      for (let n = 0; n < x.length; n += 1) ds[Math.min(SHADES - 1, Math.floor(share[n] * SHADES))] += `M${px(at.sx(x[n]))} ${px(at.sy(y[n]))}h0`;
      ds.forEach((d, s) => { if (d) found.push([s, `<path class="spots" d="${d}" stroke="${mixed(stops, s / (SHADES - 1))}"/>`]); });
    });
    found.sort((a, b) => a[0] - b[0]);
    return `<g fill="none" stroke-width="${size}" stroke-linecap="round" stroke-opacity="0.75">${found.map(([, path]) => path).join("")}</g>`;
  }
  function arrow([x0, y0], [x1, y1], at) {
    const [ax, ay, bx, by] = [at.sx(x0), at.sy(y0), at.sx(x1), at.sy(y1)], long = Math.hypot(bx - ax, by - ay) || 1, [ux, uy] = [(bx - ax) / long, (by - ay) / long], head = Math.min(8, long);
    return `<path class="arrow" d="M${px(ax)} ${px(ay)}L${px(bx)} ${px(by)}M${px(bx - head * (ux + 0.6 * uy))} ${px(by - head * (uy - 0.6 * ux))}L${px(bx)} ${px(by)}L${px(bx - head * (ux - 0.6 * uy))} ${px(by - head * (uy + 0.6 * ux))}" fill="none" stroke="var(--ink)" stroke-width="2.4"/>`;
  }
  // Names with their colours below a chart, in rows that fit.
  function legend(names, left, top, width) {
    let x = left, y = top, svg = "";
    for (const { name, colour, look } of names) {
      const wide = 24 + 5.8 * name.length;
      if (x > left && x + wide > width) { x = left; y += 15; }
      const mark = { dot: `<circle cx="${x + 6}" cy="${y - 4}" r="3" fill="${colour}"/>`, dash: `<path d="M${x} ${y - 4}h12" stroke="${colour}" stroke-width="2" stroke-dasharray="4 2"/>`, line: `<path d="M${x} ${y - 4}h12" stroke="${colour}" stroke-width="2.4"/>` }[look] || `<rect x="${x}" y="${y - 9}" width="11" height="10" fill="${colour}"/>`;
      svg += `${mark}<text x="${x + 16}" y="${y}">${esc(name)}</text>`;
      x += wide;
    }
    return { svg, bottom: y };
  }

  // ---- a figure: title, window, drawing, and what can be saved ---------------------------------

  const figures = new WeakMap();
  function fill(figure, { title, at = "", width, height, label, svg, data, under, choose, drag }) {
    const named = `<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="${esc(label)}" viewBox="0 0 ${width} ${Math.ceil(height)}" font-family="system-ui, DejaVu Sans, sans-serif" font-size="10.5" fill="var(--soft)">${svg}</svg>`;
    figure.className = figure.className.includes("chart") ? figure.className : `${figure.className} chart`.trim();
    figure.innerHTML = `<figcaption><span class="title">${esc(title)}</span> <span class="at">${esc(at)}</span><span class="files"><button type="button" data-save="svg" aria-label="${esc(title)} as SVG">SVG</button><button type="button" data-save="csv" aria-label="${esc(title)} as CSV">CSV</button></span></figcaption>${named}`;
    figures.set(figure, { title, at, width, height: Math.ceil(height), svg: named, data, under, choose, drag });
    figure.hidden = false;
  }
  const of = (figure) => figures.get(figure);
  // Where the pointer is, in the units of the drawing.
  function place(figure, event) {
    const drawing = figure.querySelector("svg"), box = drawing.getBoundingClientRect(), one = of(figure);
    return [((event.clientX - box.left) / box.width) * one.width, ((event.clientY - box.top) / box.height) * one.height];
  }
  const WIDTH = 290, HEIGHT = 200;
  function box(width, height, { left = 44, right = 8, top = 20, bottom = 34 } = {}) { return { left, right: width - right, top, bottom: height - bottom }; }

  // Curves, points and bars on two axes. `draw` gets the scales; `points` say what is under the pointer.
  function plot(figure, { title, at, label, x, y, draw, names = [], points = [], data, width = WIDTH, height = HEIGHT, choose, drag }) {
    const room = box(width, height), axes = frame(room, x, y), under = legend(names, 4, height + 12, width);
    const places = points.map((p) => [axes.sx(p.x), axes.sy(p.y), p]).filter(([a, b]) => known(a) && known(b));
    const nearest = (mx, my) => {
      let best = null, least = 14 * 14;
      for (const [a, b, p] of places) { const far = (a - mx) ** 2 + (b - my) ** 2; if (far < least) { least = far; best = p; } }
      return best;
    };
    const clip = `c${(plot.count = (plot.count || 0) + 1)}`;
    const svg = `<clipPath id="${clip}"><rect x="${room.left - 4}" y="${room.top - 4}" width="${room.right - room.left + 8}" height="${room.bottom - room.top + 8}"/></clipPath>${axes.svg}<g clip-path="url(#${clip})">${draw(axes)}</g>${under.svg}`;
    fill(figure, { title, at, label, width, height: names.length ? under.bottom + 6 : height, svg, data, under: (mx, my) => nearest(mx, my)?.text ?? null, choose: choose && ((mx, my) => { const p = nearest(mx, my); if (p) choose(p); }), drag: drag && { room, axes, done: drag } });
  }

  // Cells of layers × heads; `value`, `text` by layer and head, undefined where there is no head.
  function map(figure, { title, at, label, layers, heads, value, text, range, twoSided, layerName, data, choose, width, unit }) {
    const tall = layers <= 8 ? (width < 300 ? 15 : 22) : Math.max(5, Math.min(14, 420 / layers)), left = 30, top = 4, wide = (width - left - 6) / heads, bottom = top + tall * layers, gap = wide > 6 ? 1 : 0.4;
    const stops = twoSided ? DIVERGING : ONE_SIDED, levels = 40, ds = new Map(), rows = Math.ceil(layers / 20), columns = Math.ceil(heads / Math.max(4, Math.floor((width - left) / 26)));
    for (let l = 0; l < layers; l += 1) for (let h = 0; h < heads; h += 1) {
      const v = value(l, h);
      if (v === undefined) continue;
      const level = known(v) ? Math.max(0, Math.min(levels, Math.round(((v - range[0]) / (range[1] - range[0] || 1)) * levels))) : -1;
      ds.set(level, `${ds.get(level) || ""}M${px(left + h * wide)} ${px(top + l * tall)}h${px(wide - gap)}v${px(tall - gap)}h${px(gap - wide)}z`);
    }
    const cells = [...ds].map(([level, d]) => `<path d="${d}" fill="${level < 0 ? "var(--line)" : mixed(stops, level / levels)}"/>`).join("");
    let axis = "";
    for (let l = 0; l < layers; l += rows) axis += `<text x="${left - 4}" y="${px(top + (l + 0.5) * tall + 3.5)}" text-anchor="end">${esc(layerName(l))}</text>`;
    for (let h = 0; h < heads; h += columns) axis += `<text x="${px(left + (h + 0.5) * wide)}" y="${bottom + 12}" text-anchor="middle">${h}</text>`;
    const id = `g${(map.count = (map.count || 0) + 1)}`, barTop = bottom + 40, middle = left + 42, long = width - middle - 48;
    const ends = [range[0], range[1]].map((x) => (twoSided ? signed(x) : short(x)));
    const bar = `<text x="2" y="${bottom + 12}">layer</text><text x="${width - 4}" y="${bottom + 24}" text-anchor="end">head</text><linearGradient id="${id}">${stops.map((c, n) => `<stop offset="${n / (stops.length - 1)}" stop-color="${c}"/>`).join("")}</linearGradient><rect x="${middle}" y="${barTop - 9}" width="${long}" height="9" fill="url(#${id})" stroke="var(--line)"/><text x="${middle - 4}" y="${barTop}" text-anchor="end">${esc(ends[0])}</text><text x="${middle + long + 4}" y="${barTop}">${esc(ends[1])}</text>${unit ? `<text x="${middle + long / 2}" y="${barTop + 13}" text-anchor="middle">${esc(unit)}</text>` : ""}`;
    const head = (mx, my) => { const l = Math.floor((my - top) / tall), h = Math.floor((mx - left) / wide); return l >= 0 && l < layers && h >= 0 && h < heads && value(l, h) !== undefined ? [l, h] : null; };
    fill(figure, {
      title, at, label, width, height: barTop + (unit ? 18 : 6), data,
      svg: `${cells}<path class="marked" d="" fill="none" stroke-linecap="round"/><rect class="chosen" fill="none" stroke="#00a5c4" stroke-width="2.5" display="none"/>${axis}${bar}`,
      under: (mx, my) => { const found = head(mx, my); return found && text(...found); },
      choose: (mx, my) => { const found = head(mx, my); if (found) choose(...found); },
    });
    Object.assign(of(figure), { cell: (l, h) => [left + h * wide, top + l * tall, wide - gap, tall - gap] });
  }
  // Outline a head of a map, and put dots on others, without drawing it anew.
  function outline(figure, head) {
    const mark = figure.querySelector(".chosen");
    if (!head) { mark.setAttribute("display", "none"); return; }
    const [x, y, w, h] = of(figure).cell(...head);
    mark.removeAttribute("display");
    for (const [name, v] of Object.entries({ x: x - 1, y: y - 1, width: w + 2, height: h + 2 })) mark.setAttribute(name, px(v));
  }
  function dot(figure, heads) {
    const d = heads.map((head) => { const [x, y, w, h] = of(figure).cell(...head); return `M${px(x + w / 2)} ${px(y + h / 2)}h0`; }).join("");
    const mark = figure.querySelector(".marked");
    mark.setAttribute("d", d); mark.dataset.count = heads.length;
  }

  // Parts that sum to a whole, a bar of each row; parts below zero, by chance, have no width.
  function parts(figure, { title, at, label, rows, colours, data, width = WIDTH }) {
    let y = 6, svg = "";
    for (const { name, values, text } of rows) {
      if (name) { svg += `<text x="2" y="${y + 9}">${esc(name)}</text>`; y += 14; }
      const whole = values.reduce((sum, v) => sum + Math.max(0, v || 0), 0) || 1;
      let x = 2;
      values.forEach((v, n) => { const wide = (Math.max(0, v || 0) / whole) * (width - 4); svg += `<rect x="${px(x)}" y="${y}" width="${px(wide)}" height="18" fill="${colours[n].colour}"/>`; x += wide; });
      y += 22;
      const told = legend(values.map((v, n) => ({ name: `${colours[n].name} ${text(v)}`, colour: colours[n].colour })), 2, y + 10, width);
      svg += told.svg; y = told.bottom + 8;
    }
    fill(figure, { title, at, label, width, height: y + 2, svg, data });
  }

  // ---- files -----------------------------------------------------------------------------------

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // The drawing alone, with its title, and with colours that need no style sheet.
  function asSvg(figure) {
    const one = of(figure), inner = [...figure.querySelector("svg").children].map((child) => new XMLSerializer().serializeToString(child)).join("");
    const text = `<svg xmlns="http://www.w3.org/2000/svg" width="${2 * one.width}" height="${2 * (one.height + 24)}" viewBox="0 -24 ${one.width} ${one.height + 24}" font-family="system-ui, DejaVu Sans, sans-serif" font-size="10.5" fill="${css("--soft")}"><rect y="-24" width="100%" height="100%" fill="${css("--ground")}"/><text x="4" y="-9" font-size="12" fill="${css("--ink")}">${esc([one.title, one.at].filter(Boolean).join(" · "))}</text>${inner}</svg>`;
    return text.replace(/var\((--[\w-]+)\)/g, (_, name) => css(name));
  }
  function csvField(x) {
    const text = x === null || x === undefined ? "" : String(x), safe = typeof x === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }
  const asCsv = ({ columns, rows }) => [columns, ...rows, []].map((row) => row.map(csvField).join(",")).join("\n");

  return { esc, known, short, signed, mixed, around, plot, map, outline, dot, parts, line, spots, errors, clouds, arrow, fill, of, place, scale, asSvg, asCsv, css, DIVERGING, ONE_SIDED };
})();
