// Leads the language switch to the same section. Loads the search; says why there is none where pages
// are opened as files.
"use strict";
addEventListener("DOMContentLoaded", () => {
  const headings = [...document.querySelectorAll("article[role=main] :is(h1, h2, h3, h4, h5, h6)")];
  const levels = headings.map(({tagName}) => tagName[1]).join("");
  const [, index, of] = /^#heading-(\d+)-(\d+)$/.exec(location.hash) ?? [];
  if (of === levels) location.replace(`#${headings[index].id}`);
  const language = document.querySelector("a.language");
  language.addEventListener("click", () => {
    const current = document.querySelector(".toc-tree .scroll-current > a")?.hash.slice(1);
    const at = headings.findIndex(({id}) => id && id === decodeURIComponent(current));
    language.hash = at < 0 ? "" : `heading-${at}-${levels}`;
  });

  const box = document.getElementById("book-search");
  const isChinese = document.documentElement.lang.startsWith("zh");
  if (location.protocol === "file:") {
    const folder = decodeURIComponent(new URL(`${box.dataset.root}..`, location).pathname);
    const command = `python -m http.server -d ${folder}`;
    box.textContent = isChinese ? `要搜索，请先运行：${command}` : `To search, serve the folder: ${command}`;
    return;
  }
  const folder = `${box.dataset.root}pagefind/`;
  const style = Object.assign(document.createElement("link"), {rel: "stylesheet", href: `${folder}pagefind-ui.css`});
  const script = Object.assign(document.createElement("script"), {src: `${folder}pagefind-ui.js`});
  script.onload = () => new PagefindUI({element: box, showImages: false, showSubResults: true, resetStyles: false,
    // A long chapter is not worse than a short page, and a word counts as often as it is there.
    ranking: {pageLength: 0, termFrequency: 0}});
  document.head.append(style, script);
});
