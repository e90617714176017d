"use strict";
// The table of heads: sort by a click on a column, filter as one types, page by page; downloads what is filtered.
// Names of heads open the explorer; words of the glossary say what they mean on hover.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const PER_PAGE = 50;
  const pad = (n) => String(n).padStart(2, "0");
  const name = (i) => `l${pad(data.layer[i])}h${pad(data.head[i])}`;
  const columns = [
    { label: "head", get: name, order: (i) => data.layer[i] * 10000 + data.head[i], meaning: "layer and query head" },
    { label: "run", get: (i) => data.runs[data.run[i]], order: (i) => data.run[i], meaning: "model or checkpoint" },
    { label: "class", get: (i) => data.kind[i], order: (i) => data.kind[i], meaning: "the term that most of the variance of its scores comes from; without a known rotation, the published class" },
    ...data.columns.map((column, c) => ({
      label: column.name, meaning: column.meaning + (column.unit ? ` [${column.unit}]` : ""),
      get: (i) => (data.values[c][i] === null ? "" : short(data.values[c][i])), order: (i) => data.values[c][i], raw: (i) => data.values[c][i],
    })),
  ];
  const state = { sort: null, down: false, page: 0, rows: data.layer.map((_, i) => i) };
  const $ = (id) => document.getElementById(id);

  function short(x) {
    const size = Math.abs(x);
    return size !== 0 && (size < 1e-3 || size >= 1e5) ? x.toExponential(2) : Number(x.toPrecision(3)).toString();
  }
  function option(select, text) {
    const item = document.createElement("option");
    item.value = text; item.textContent = text;
    select.append(item);
  }
  function cell(kind, text) {
    const item = document.createElement(kind);
    if (text !== undefined) item.textContent = text;
    return item;
  }
  function link(i) {
    const item = cell("th", data.explorer ? undefined : name(i));
    item.scope = "row";
    if (data.explorer) {
      const anchor = cell("a", name(i));
      anchor.href = target(name(i), data.runs[data.run[i]]);
      item.append(anchor);
    }
    return item;
  }
  function target(head, run, from = "heads") { return `${data.explorer}#${head};run=${encodeURIComponent(run)};from=${from}`; }
  function head() {
    const row = document.createElement("tr");
    columns.forEach((column, c) => {
      const item = cell("th", column.label);
      item.scope = "col"; item.title = column.meaning; item.tabIndex = 0;
      if (state.sort === c) item.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      const sort = () => {
        state.down = state.sort === c ? !state.down : c > 2;
        state.sort = c; state.page = 0;
        update();
      };
      item.addEventListener("click", sort);
      item.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } });
      row.append(item);
    });
    $("table").tHead.replaceChildren(row);
  }
  function filtered() {
    const find = $("find").value.trim().toLowerCase(), run = $("run").value, kind = $("class").value;
    return data.layer.map((_, i) => i).filter((i) =>
      (!run || data.runs[data.run[i]] === run) && (!kind || data.kind[i] === kind) &&
      (!find || `${name(i)} ${data.runs[data.run[i]]} ${data.kind[i]}`.toLowerCase().includes(find)));
  }
  function update() {
    const rows = filtered();
    if (state.sort !== null) {
      const { order } = columns[state.sort], sign = state.down ? -1 : 1;
      rows.sort((a, b) => {
        const x = order(a), y = order(b);
        if (x === null || y === null) return (x === null) - (y === null); // empty ones last, either way
        return x < y ? -sign : x > y ? sign : a - b;
      });
    }
    state.rows = rows;
    const pages = Math.max(1, Math.ceil(rows.length / PER_PAGE));
    state.page = Math.min(state.page, pages - 1);
    const shown = rows.slice(state.page * PER_PAGE, (state.page + 1) * PER_PAGE);
    $("table").tBodies[0].replaceChildren(...shown.map((i) => {
      const row = document.createElement("tr");
      row.append(...columns.map((column, c) => (c ? cell("td", column.get(i)) : link(i))));
      return row;
    }));
    $("count").textContent = `${rows.length.toLocaleString("en")} of ${data.layer.length.toLocaleString("en")} heads`;
    $("page").textContent = `page ${state.page + 1} of ${pages}`;
    $("back").disabled = state.page === 0; $("next").disabled = state.page === pages - 1;
    head();
  }
  function download() {
    // A field that a spreadsheet would take for a formula is marked as text.
    const field = (value) => {
      const text = value === null || value === undefined ? "" : String(value);
      const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
      return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
    };
    const names = ["model", "layer", "head", "class", ...data.columns.map((column) => column.name)];
    const lines = state.rows.map((i) => [data.runs[data.run[i]], data.layer[i], data.head[i], data.kind[i],
      ...data.values.map((values) => values[i])].map(field).join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([[names.join(","), ...lines, ""].join("\n")], { type: "text/csv" }));
    link.download = "heads.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  data.runs.forEach((run) => option($("run"), run));
  [...new Set(data.kind)].filter(Boolean).sort().forEach((kind) => option($("class"), kind));
  for (const id of ["find", "run", "class"]) $(id).addEventListener("input", () => { state.page = 0; update(); });
  $("back").addEventListener("click", () => { state.page -= 1; update(); });
  $("next").addEventListener("click", () => { state.page += 1; update(); });
  $("download").addEventListener("click", download);
  if (data.runs.length > 1) $("run").value = data.runs[data.runs.length - 1]; // the last is what one asks about
  update();

  // ---- the appendix: what a link names is unfolded, and on paper everything ----

  function unfold() {
    const named = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let item = named; item; item = item.parentElement) if (item.tagName === "DETAILS") item.open = true;
    if (named) named.scrollIntoView();
  }
  addEventListener("hashchange", unfold);
  addEventListener("beforeprint", () => document.querySelectorAll("details:not(.table)").forEach((item) => { item.open = true; }));
  unfold();

  // ---- folded rows, captions, words, heads ----

  for (const button of document.querySelectorAll(".unfold")) {
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") !== "true";
      button.closest("section").querySelectorAll("tr.folded").forEach((row) => { row.hidden = !open; });
      button.setAttribute("aria-expanded", String(open));
      button.textContent = open ? "Show fewer" : `Show ${button.dataset.n} more rows`;
    });
  }
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const caption = button.closest("figcaption").cloneNode(true);
      caption.querySelector(".files").remove();
      const text = caption.textContent.replace(/\s+/g, " ").trim();
      try { await navigator.clipboard.writeText(text); button.textContent = "copied"; } catch { getSelection().selectAllChildren(button.closest("figcaption")); }
    });
  }
  const words = new Map(Object.entries(JSON.parse($("words").textContent)));
  const labels = [...data.runs].sort((a, b) => b.length - a.length).map((label) => label.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const known = [...words.keys()].filter((word) => /[_0-9]|^(decay|logit|nat|sink|drift)$/.test(word)).sort((a, b) => b.length - a.length);
  const pattern = new RegExp(`\\b(l\\d\\d+h\\d\\d+)(?: of (${labels.join("|")}))?|(?<![\\w_])(${known.join("|")})(?![\\w_])`, "g");
  const parents = document.querySelectorAll(".lead, .of, main :is(#findings, #opening, details.section:not(#heads, #glossary)) :is(p, li, dd, h2, strong, figcaption, thead th)");
  for (const parent of parents) {
    for (const node of [...parent.childNodes].filter((child) => child.nodeType === Node.TEXT_NODE)) {
      const parts = [], text = node.textContent;
      let at = 0;
      for (const match of text.matchAll(pattern)) {
        const [whole, found, run, word] = match;
        let item = null;
        if (found && data.explorer) { item = cell("a", whole); item.href = target(found, run || data.runs[data.runs.length - 1], parent.closest("[id]")?.id); }
        else if (word) { item = cell("abbr", whole); item.title = words.get(word); }
        if (!item) continue;
        parts.push(text.slice(at, match.index), item);
        at = match.index + whole.length;
      }
      if (parts.length) node.replaceWith(...parts, text.slice(at));
    }
  }
})();
