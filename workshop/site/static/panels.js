// What the site adds to two pages: a filter above the museum's entries and a list of the tickets. An
// address such as #bug-12 opens what is folded there.
"use strict";
(() => {
  const isChinese = document.documentElement.lang.startsWith("zh");
  const say = (english, chinese) => (isChinese ? chinese : english);
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const choice = (label, options, chosen, change) => {
    const select = make("select", {}, ...options.map((option) => make("option", {}, option)));
    select.selectedIndex = chosen;
    select.addEventListener("change", change);
    return [make("label", {}, `${label} `, select), select];
  };
  const firstSection = (element) => element.closest("section") ?? element;

  // -- museum

  const ENTRIES = "details[id^=bug-]";
  const plain = (text) => text.toLowerCase().replaceAll("’", "'").replace(/\s+/g, " ");

  // Each word of the query as a pattern. A number is found as a whole: #14 is not #144.
  const patterns = (query) =>
    (plain(query).match(/\S+/g) ?? []).map((word) => {
      const escaped = word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
      return new RegExp(`${/^\d/.test(word) ? "(?<!\\d)" : ""}${escaped}${/\d$/.test(word) ? "(?!\\d)" : ""}`);
    });

  // The engines in an entry's summary, "7. vLLM #1 #2, SGLang #3".
  function enginesOf(entry) {
    const origin = entry.querySelector("summary").textContent.replace(/^\d+\. /, "");
    return origin.replace(/#\d+/g, "").split(/[,，]/).map((name) => name.trim());
  }

  function museum() {
    const entries = [...document.querySelectorAll(ENTRIES)];
    if (!entries.length) return;
    const facts = entries.map((entry) => ({entry, text: plain(entry.textContent), engines: enginesOf(entry)}));
    const totals = new Map();
    for (const name of facts.flatMap(({engines}) => engines)) totals.set(name, (totals.get(name) ?? 0) + 1);
    const engines = [...totals.keys()].filter((name) => name && totals.get(name) > 1)
      .sort((one, other) => totals.get(other) - totals.get(one));
    const count = make("output", {"aria-live": "polite"});
    const field = make("input", {type: "search", placeholder:
      say("words of a title or an engine", "标题、引擎里的词")});
    const options = [say("all", "全部"), ...engines.map((name) => `${name} (${totals.get(name)})`)];
    const [label, select] = choice(say("Engine", "引擎"), options, 0, filter);
    field.addEventListener("input", filter);
    const form = make("form", {class: "museum-filter", role: "search"},
      make("label", {}, `${say("Find", "查找")} `, field), label, count);
    form.addEventListener("submit", (event) => event.preventDefault());
    firstSection(entries[0]).before(form);

    function filter() {
      const wanted = patterns(field.value), engine = engines[select.selectedIndex - 1];
      for (const {entry, text, engines: own} of facts) {
        entry.hidden = !wanted.every((word) => word.test(text)) || (engine !== undefined && !own.includes(engine));
      }
      for (const section of new Set(entries.map(firstSection))) {
        section.hidden = section.querySelector("details[id]:not([hidden])") === null;
      }
      const number = entries.filter((entry) => !entry.hidden).length;
      count.textContent = say(`${number} of ${entries.length} bugs`, `${entries.length} 个 bug 中的 ${number} 个`);
    }
    filter();
    museum.showAll = () => {
      field.value = "";
      select.selectedIndex = 0;
      filter();
    };
  }

  // Open the folds around what the address names, and show it if the filter has hidden it.
  function openTarget() {
    if (/%(?![\da-f]{2})/i.test(location.hash)) return; // no address
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    if (target.closest("[hidden]")) museum.showAll?.();
    for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    target.scrollIntoView();
  }

  // -- tickets

  function tickets() {
    const titles = [...document.querySelectorAll("h3")]
      .map((title) => ({title, words: /^(?:Ticket|工单) \d+[.：] ?([^#]*)/.exec(title.textContent.trim())}))
      .filter(({words}) => words);
    if (!titles.length) return;
    const links = titles.map(({title, words}) =>
      make("li", {}, make("a", {href: `#${title.id || title.closest("section[id]")?.id}`}, words[1])));
    document.querySelector("h1 ~ section, h2").before(make("ol", {class: "tickets"}, ...links));
  }

  addEventListener("DOMContentLoaded", () => {
    museum();
    tickets();
    openTarget();
  });
  addEventListener("hashchange", openTarget);
})();
