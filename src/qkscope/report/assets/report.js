"use strict";
// The table of heads: sort by a click on a column, filter as one types, page by page; downloads what is filtered.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const PER_PAGE = 50;
  const pad = (n) => String(n).padStart(2, "0");
  const name = (i) => `l${pad(data.layer[i])}h${pad(data.head[i])}`;
  const columns = [
    { label: "head", get: name, order: (i) => data.layer[i] * 10000 + data.head[i], meaning: "layer and query head" },
    { label: "run", get: (i) => data.runs[data.run[i]], order: (i) => data.run[i], meaning: "model or checkpoint" },
    { label: "class", get: (i) => data.taxonomy[i], order: (i) => data.taxonomy[i], meaning: "from PC0" },
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
    item.textContent = text;
    return item;
  }
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
      (!run || data.runs[data.run[i]] === run) && (!kind || data.taxonomy[i] === kind) &&
      (!find || `${name(i)} ${data.runs[data.run[i]]} ${data.taxonomy[i]}`.toLowerCase().includes(find)));
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
      row.append(...columns.map((column, c) => cell(c ? "td" : "th", column.get(i))));
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
    const names = ["model", "layer", "head", "taxonomy", ...data.columns.map((column) => column.name)];
    const lines = state.rows.map((i) => [data.runs[data.run[i]], data.layer[i], data.head[i], data.taxonomy[i],
      ...data.values.map((values) => values[i])].map(field).join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([[names.join(","), ...lines, ""].join("\n")], { type: "text/csv" }));
    link.download = "heads.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  data.runs.forEach((run) => option($("run"), run));
  [...new Set(data.taxonomy)].filter(Boolean).sort().forEach((kind) => option($("class"), kind));
  for (const id of ["find", "run", "class"]) $(id).addEventListener("input", () => { state.page = 0; update(); });
  $("back").addEventListener("click", () => { state.page -= 1; update(); });
  $("next").addEventListener("click", () => { state.page += 1; update(); });
  $("download").addEventListener("click", download);
  update();
})();
