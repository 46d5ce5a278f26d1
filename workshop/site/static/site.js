// Loads the search; says why there is none where pages are opened as files.
addEventListener("DOMContentLoaded", () => {
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
