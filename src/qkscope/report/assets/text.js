"use strict";
// The passage in one head, of one run or two: which tokens a query scores high, and which of the four terms say so.
const textView = (() => {
  const TERMS = ["position", "key", "query", "content"], SINKS = 4, LISTED = 6;
  const make = (kind, text, className) => { const item = document.createElement(kind); if (text !== undefined) item.textContent = text; if (className) item.className = className; return item; };

  function unpack(bytes, n) {
    // In encoders a query sees every token, else only those up to itself.
    const all = bytes.length === 4 * n + 4 * n * n, pairs = all ? n * n : (n * (n + 1)) / 2;
    if (bytes.length !== 4 * n + 4 * pairs) return null;
    const units = new Float32Array(bytes.slice(0, 4 * n).buffer);
    const levels = TERMS.map((_, t) => new Int8Array(bytes.buffer, bytes.byteOffset + 4 * n + t * pairs, pairs));
    // Logits of each term for the keys of a query.
    return (query) => Object.fromEntries(TERMS.map((term, t) => [term, Float64Array.from({ length: all ? n : query + 1 }, (_, key) => units[query] * levels[t][(all ? query * n : (query * (query + 1)) / 2) + key])]));
  }
  // Attention depends on differences between keys only; the first tokens, the sinks, would hide all others.
  function centred(values) {
    const from = values.length > 2 * SINKS ? SINKS : 0, rest = values.slice(from);
    const mean = rest.reduce((sum, x) => sum + x, 0) / rest.length;
    return { away: values.map((x) => x - mean), from };
  }
  function rowOf(terms) {
    const of = Object.fromEntries(TERMS.map((term) => [term, centred(terms[term])]));
    const away = Object.fromEntries(TERMS.map((term) => [term, of[term].away])), from = of.position.from;
    away.score = away.position.map((_, key) => TERMS.reduce((sum, term) => sum + away[term][key], 0));
    const rest = (values) => values.slice(from), dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
    const whole = dot(rest(away.score), rest(away.score));
    const shares = Object.fromEntries(TERMS.map((term) => [term, whole > 0 ? dot(rest(away[term]), rest(away.score)) / whole : null]));
    return { away, from, shares };
  }
  function colour(value, most) {
    const strength = Math.min(1, Math.abs(value) / (most || 1));
    return `color-mix(in srgb, var(${value < 0 ? "--below" : "--above"}) ${Math.round(85 * strength)}%, transparent)`;
  }
  const seen = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "·";
  const signed = (x) => `${x < 0 ? "−" : "+"}${Math.abs(x).toFixed(Math.abs(x) < 10 ? 1 : 0)}`;

  // Tokens by word, as numbers: a word begins after or with a space. Tokenizers that write none keep tokens apart.
  function words(tokens) {
    const spaced = tokens.slice(1).some((text) => /^\s|\s$/.test(text)), found = [];
    tokens.forEach((text, n) => {
      const begins = n === 0 || (spaced ? /^\s/.test(text) || /\s$/.test(tokens[n - 1]) : !text.startsWith("##"));
      if (begins) found.push([n]); else found[found.length - 1].push(n);
    });
    return { found, spaced };
  }
  // The token at the same place in a text that another tokenizer has cut.
  function sameToken(from, query, to) {
    if (from.join("").trim() !== to.join("").trim()) return Math.min(query, to.length - 1);
    const end = from.slice(query + 1).join("").length;
    let after = 0, n = to.length - 1;
    while (n > 0 && after + to[n].length <= end) { after += to[n].length; n -= 1; }
    return n;
  }

  function passage(side, query, row, values, most, choose) {
    const text = make("div", undefined, "passage"), { found, spaced } = words(side.tokens);
    text.setAttribute("role", "group"); text.setAttribute("aria-label", `Tokens of the text${side.label ? ` in ${side.label}` : ""}`);
    for (const members of found) {
      const word = make("span", undefined, members.length > 8 ? "" : "word");
      for (const key of members) {
        const button = make("button", seen(side.tokens[key]), "token");
        button.type = "button"; button.tabIndex = key === query ? 0 : -1; button.dataset.token = key;
        button.setAttribute("aria-pressed", String(key === query));
        if (key < values.length) { button.style.background = colour(values[key], most); button.title = `${signed(values[key])} logits`; } else button.classList.add("later");
        button.addEventListener("click", () => choose(key));
        word.append(button);
      }
      text.append(word, ...(spaced ? [make("wbr")] : [" "]));
    }
    return text;
  }
  // A key in its words: what stands before, the word it is part of, what follows.
  function context(side, key) {
    const { found, spaced } = words(side.tokens), at = found.findIndex((members) => members.includes(key)), what = make("span", undefined, "what");
    const written = (n) => (found[n] ? found[n].map((k) => seen(side.tokens[k])).join("") : "");
    const own = make("b");
    for (const k of found[at]) own.append(k === key && found[at].length > 1 ? make("u", seen(side.tokens[k])) : seen(side.tokens[k]));
    const gap = spaced ? "" : " ";
    what.append(make("span", written(at - 1) + gap), own, make("span", gap + written(at + 1)));
    return what;
  }
  function inWord(side, token) {
    const members = words(side.tokens).found.find((those) => those.includes(token)), word = members.map((n) => seen(side.tokens[n])).join("").trim();
    return members.length > 1 ? `${seen(side.tokens[token]).trim()}” of “${word}` : word;
  }
  function highest(side, query, row) {
    const { found } = words(side.tokens), wordOf = new Map(found.flatMap((members, n) => members.map((key) => [key, n]))), taken = new Set();
    // The highest keys, one of each word.
    const best = Array.from(row.away.score.keys()).filter((key) => key !== query).sort((a, b) => row.away.score[b] - row.away.score[a])
      .filter((key) => !taken.has(wordOf.get(key)) && taken.add(wordOf.get(key))).slice(0, LISTED);
    return best;
  }
  // How far the bars of some keys reach to either side, at most.
  const reached = (best, row) => Math.max(...best.map((key) => Math.max(...[1, -1].map((sign) => TERMS.reduce((sum, name) => sum + Math.max(0, sign * row.away[name][key]), 0)))), 1e-9);
  function bars(side, query, row, best, longest) {
    const list = make("div", undefined, "bars");
    list.append(...best.map((key) => {
      const line = make("div", undefined, "line"), sides = [-1, 1].map((sign) => {
        const half = make("span", undefined, sign < 0 ? "minus" : "plus");
        for (const name of TERMS) {
          const size = Math.max(0, sign * row.away[name][key]);
          if (size > 0) { const part = make("i", undefined, name); part.style.width = `${(100 * size) / longest}%`; part.title = `${name} ${signed(row.away[name][key])}`; half.append(part); }
        }
        return half;
      });
      const where = make("span", `${Math.abs(query - key)} ${key < query ? "back" : "ahead"}`, "far");
      where.title = `tokens ${key < query ? "before" : "after"} the query`;
      line.append(context(side, key), where, ...sides, make("span", signed(row.away.score[key]), "sum"));
      return line;
    }));
    return list;
  }

  // Draws the text of each side, a run at a window: `bytes` are its packed scores. Returns what was found in each.
  function draw(host, given, chosen, onChoice) {
    const sides = given.map((side) => ({ ...side, terms: side.bytes && side.tokens.length > 1 ? unpack(side.bytes, side.tokens.length) : null })).filter((side) => side.terms !== null);
    host.hidden = sides.length === 0;
    if (host.hidden) return [];
    const first = sides[0], last = first.tokens.length - 1, query = Math.min(last, Math.max(1, chosen.query ?? last)), term = ["score", ...TERMS].includes(chosen.term) ? chosen.term : "score";
    const [choices, key, columns, said] = host.querySelectorAll("[data-part]");
    // What had the focus is drawn anew, so it gets the focus again.
    const to = (choice, part, pressed) => { onChoice(choice); host.querySelector(`${part} ${pressed}`).focus(); };
    choices.replaceChildren(...["score", ...TERMS].map((name) => {
      const button = make("button", name === "score" ? "whole score" : name, name);
      button.type = "button"; button.dataset.term = name;
      button.setAttribute("aria-pressed", String(name === term));
      button.addEventListener("click", () => to({ query, term: name }, ".terms", "[aria-pressed='true']"));
      return button;
    }));
    const rows = sides.map((side) => {
      const own = side === first ? query : sameToken(first.tokens, query, side.tokens), row = rowOf(side.terms(own)), best = highest(side, own, row);
      return { own, row, best };
    });
    // One scale of colours and bars for both runs.
    const longest = Math.max(...rows.map(({ best, row }) => reached(best, row)));
    const most = Math.max(...rows.flatMap(({ row }) => Array.from(row.away[term].slice(row.from), Math.abs)), 1e-9);
    key.replaceChildren(make("span", `${signed(-most)} logits: below its average key`), make("i", undefined, "ramp"), make("span", `${signed(most)}: above it`));
    const found = [];
    columns.classList.toggle("two", sides.length > 1);
    columns.replaceChildren(...sides.map((side, n) => {
      const { own, row, best } = rows[n], column = make("div", undefined, "reading"), list = bars(side, own, row, best, longest);
      const choose = (at) => to({ query: Math.max(1, side === first ? at : sameToken(side.tokens, at, first.tokens)), term }, `.reading:nth-child(${n + 1})`, "[tabindex='0']");
      const text = passage(side, own, row, row.away[term], most, choose);
      text.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!step) return;
        event.preventDefault(); event.stopPropagation();
        choose(Math.min(side.tokens.length - 1, Math.max(1, own + step)));
      });
      column.append(make("h3", [side.label, side.at].filter(Boolean).join(" · ")), text, list);
      found.push({ query: own, term, best, shares: row.shares });
      return column;
    }));
    const share = (shares) => TERMS.map((name) => `${name} ${String(Math.round(100 * shares[name])).replace("-", "−")}%`).join(", ");
    const told = found.map(({ shares }, n) => (shares.position === null ? "" : `${sides.length > 1 ? `${sides[n].label}: ` : ""}${share(shares)}`)).filter(Boolean).join("; ");
    said.textContent = told && `Of the differences between the scores of “${inWord(first, query)}” with its keys: ${told}. Bars: its highest keys, one of each word, between the words around it, in logits above the average key${rows[0].row.from ? `; the first ${rows[0].row.from} tokens are left out of averages` : ""}.`;
    return found;
  }
  return { draw };
})();
