"use strict";
// Scene 1: requests x steps. (Skeleton.)
(() => {
  const {h} = Watch;
  Watch.scene({
    name: "grid",
    title: ["Requests and steps", "请求与步"],
    make(root, view) {
      const list = h("pre");
      root.append(list);
      return {
        draw() {
          const lines = [...(view.facts?.cells ?? [])].map(
            ([id, cells]) => `${id}: ${cells.map((c) => `${c.kind} ${c.numTokens}`).join(", ")}`);
          for (const [id, reason] of view.film.waits(view.step)) lines.push(`${id} waits: ${reason}`);
          list.textContent = lines.join("\n");
        },
      };
    },
  });
})();
