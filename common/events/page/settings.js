"use strict";
// What Python knows and the page needs: the schema of events, the reasons to wait, a title.
(() => {
  Watch.settings = JSON.parse(document.getElementById("settings").textContent);
  Watch.schema = Watch.settings.schema;
  Watch.version = Watch.settings.version;
})();
