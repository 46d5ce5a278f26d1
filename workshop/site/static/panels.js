// What the site adds to three pages: a filter above the museum's entries, a list of the tickets, and
// the ladder as a figure whose rows can be hidden and two compared. An address such as #bug-12 opens
// what is folded there.
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

  // -- ladder

  const format = (number, digits) => number.toLocaleString("en-US", {maximumFractionDigits: digits});
  const shown = (number) => format(number, number < 100 ? 1 : 0);
  const COLUMNS = [
    {name: say("throughput", "吞吐"), unit: "tok/s", best: say("more is better", "越多越好")},
    {name: say("time to first token (p50)", "首 token 延迟（p50）"), unit: "ms", best: say("less is better", "越少越好")},
    {name: say("inter-token latency (p99)", "token 间延迟（p99）"), unit: "ms", best: say("less is better", "越少越好")},
  ];

  // "throughput rises to 5.1 times (95 → 486 tok/s)", from the medians.
  function change({name, unit}, before, after) {
    const ratio = after / before, percent = 100 * ratio;
    const times = format(ratio, ratio < 2 ? 2 : ratio < 10 ? 1 : 0);
    const rest = format(percent, percent < 10 ? 1 : 0);
    const words = ratio === 1 ? say("stays the same", "不变")
      : ratio > 1 ? say(`rises to ${times} times`, `升到 ${times} 倍`) : say(`falls to ${rest}%`, `降到 ${rest}%`);
    return make("li", {}, `${name}${say(" ", "")}`, make("strong", {}, words),
      say(` (${shown(before)} → ${shown(after)} ${unit})`, `（${shown(before)} → ${shown(after)} ${unit}）`));
  }

  function ladder(host) {
    const workloads = JSON.parse(host.dataset.ladder), titles = workloads[0].rows.map((row) => row.title);
    const boxes = titles.map(() => make("input", {type: "checkbox", checked: ""}));
    const body = make("tbody"), ratios = make("ul", {"aria-live": "polite"});
    const [workload, work] = choice(say("Workload", "负载"), workloads.map((one) => one.title), 0, draw);
    const [from, before] = choice(say("From", "从"), titles, 0, draw);
    const [to, after] = choice(say("to", "到"), titles, titles.length - 1, draw);
    boxes.forEach((box) => box.addEventListener("change", draw));

    const cell = ([low, middle, high], most) => {
      const share = (number) => `${(100 * number) / most}%`;
      return make("td", {}, make("div", {},
        make("i", {class: "ladder-bar", style: `width: ${share(middle)}`}),
        make("i", {class: "ladder-range", style: `left: ${share(low)}; width: ${share(high - low)}`}),
        make("b", {style: `left: ${share(high)}`}, shown(middle))));
    };
    function draw() {
      const rows = workloads[work.selectedIndex].rows, visible = rows.filter((_, i) => boxes[i].checked);
      const most = COLUMNS.map((_, i) => Math.max(...visible.map((row) => row.numbers[i][2])));
      body.replaceChildren(...visible.map((row) =>
        make("tr", {class: row.isChapter ? "is-chapter" : ""}, make("th", {scope: "row"}, row.title),
          ...row.numbers.map((numbers, i) => cell(numbers, most[i])))));
      const [one, other] = [rows[before.selectedIndex], rows[after.selectedIndex]];
      ratios.replaceChildren(...COLUMNS.map((column, i) => change(column, one.numbers[i][1], other.numbers[i][1])));
    }
    draw();
    const head = COLUMNS.map(({name, unit, best}) => make("th", {scope: "col"}, name, make("small", {}, `${unit}, ${best}`)));
    host.replaceChildren(
      make("p", {}, workload),
      make("fieldset", {}, make("legend", {}, say("Show", "显示")),
        ...boxes.map((box, i) => make("label", {}, box, ` ${titles[i]}`))),
      make("table", {}, make("thead", {}, make("tr", {}, make("td"), ...head)), body),
      make("small", {}, say("A bar is the median of the runs; the thin line goes from the lowest to the highest.",
        "条是各次运行的中位数，细线从最低的一次到最高的一次。")),
      make("p", {class: "ladder-pair"}, from, to), ratios);
  }

  addEventListener("DOMContentLoaded", () => {
    museum();
    tickets();
    document.querySelectorAll(".ladder[data-ladder]").forEach(ladder);
    openTarget();
  });
  addEventListener("hashchange", openTarget);
})();
