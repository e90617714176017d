"use strict";
// The passage in one head: which tokens a query scores high, and which of the four terms say so.
const textView = (() => {
  const TERMS = ["position", "key", "query", "content"], SINKS = 4, LISTED = 6;
  const make = (kind, text, className) => { const item = document.createElement(kind); if (text !== undefined) item.textContent = text; if (className) item.className = className; return item; };

  function unpack(script, n) {
    const bytes = Uint8Array.from(atob(script.textContent.trim()), (c) => c.charCodeAt(0));
    // In encoders a query sees every token, else only those up to itself.
    const all = bytes.length === 4 * n + 4 * n * n, pairs = all ? n * n : (n * (n + 1)) / 2;
    if (bytes.length !== 4 * n + 4 * pairs) return null;
    const units = new Float32Array(bytes.buffer, 0, n);
    const levels = TERMS.map((_, t) => new Int8Array(bytes.buffer, 4 * n + t * pairs, pairs));
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

  function draw(host, script, tokens, chosen, onChoice) {
    host.hidden = !script || tokens.length < 2;
    if (host.hidden) return null;
    const terms = unpack(script, tokens.length);
    if (terms === null) { host.hidden = true; return null; }
    const query = Math.min(tokens.length - 1, Math.max(1, chosen.query ?? tokens.length - 1)), term = ["score", ...TERMS].includes(chosen.term) ? chosen.term : "score";
    const row = rowOf(terms(query)), values = row.away[term], most = Math.max(...values.slice(row.from).map(Math.abs), 1e-9);
    const [choices, text, bars, said] = host.querySelectorAll("[data-part]");
    // What had the focus is drawn anew, so it gets the focus again.
    const to = (choice, part, pressed) => { onChoice(choice); part.querySelector(pressed).focus(); };
    choices.replaceChildren(...["score", ...TERMS].map((name) => {
      const button = make("button", name, name);
      button.type = "button"; button.dataset.term = name;
      button.setAttribute("aria-pressed", String(name === term));
      button.addEventListener("click", () => to({ query, term: name }, choices, "[aria-pressed='true']"));
      return button;
    }));
    text.replaceChildren(...tokens.map((token, key) => {
      const button = make("button", seen(token), "token");
      button.type = "button"; button.tabIndex = key === query ? 0 : -1; button.dataset.token = key;
      button.setAttribute("aria-pressed", String(key === query));
      if (key < values.length) { button.style.background = colour(values[key], most); button.title = `${signed(values[key])} logits`; } else button.classList.add("later");
      button.addEventListener("click", () => to({ query: key, term }, text, "[tabindex='0']"));
      return button;
    }));
    text.onkeydown = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault(); event.stopPropagation();
      to({ query: Math.min(tokens.length - 1, Math.max(1, query + step)), term }, text, "[tabindex='0']");
    };
    const best = Array.from(values.keys()).filter((key) => key !== query).sort((a, b) => row.away.score[b] - row.away.score[a]).slice(0, LISTED);
    const longest = Math.max(...best.map((key) => Math.max(...[1, -1].map((sign) => TERMS.reduce((sum, name) => sum + Math.max(0, sign * row.away[name][key]), 0)))), 1e-9);
    bars.replaceChildren(...best.map((key) => {
      const line = make("div", undefined, "line"), sides = [-1, 1].map((sign) => {
        const side = make("span", undefined, sign < 0 ? "minus" : "plus");
        for (const name of TERMS) {
          const size = Math.max(0, sign * row.away[name][key]);
          if (size > 0) { const part = make("i", undefined, name); part.style.width = `${(100 * size) / longest}%`; part.title = `${name} ${signed(row.away[name][key])}`; side.append(part); }
        }
        return side;
      });
      line.append(make("span", `${seen(tokens[key])} ${Math.abs(query - key)} ${key < query ? "back" : "ahead"}`, "what"), ...sides, make("span", signed(row.away.score[key]), "sum"));
      return line;
    }));
    const share = (name) => `${name} ${Math.round(100 * row.shares[name])}%`;
    said.textContent = row.shares.position === null ? "" : `Of the differences between the scores of “${seen(tokens[query]).trim()}” with its keys: ${TERMS.map(share).join(", ")}. Bars: its ${best.length} highest keys, in logits above its average key${row.from ? `; the first ${row.from} tokens are left out of averages` : ""}.`;
    return { query, term, best, shares: row.shares };
  }
  return { draw };
})();
