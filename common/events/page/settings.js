// What Python knows and the page needs: the version of records, the reasons to wait, a title.
Watch.settings = JSON.parse(document.getElementById("settings").textContent);
