// Times in the reader's zone, keyboard shortcuts, and log-in links.
"use strict";

(() => {
  const full = new Intl.DateTimeFormat(undefined, {
    year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit",
  });

  function localise(root) {
    for (const time of root.querySelectorAll("time[datetime]")) {
      const at = new Date(time.dateTime);
      if (Number.isNaN(at.getTime())) continue;
      if (!("age" in time.dataset)) time.textContent = full.format(at);
      time.dataset.local = full.format(at);
    }
  }

  localise(document);
  document.addEventListener("htmx:load", (event) => localise(event.target));

  // A log-in link has its token after the #, which browsers do not send.
  const login = document.getElementById("login");
  function enter() {
    if (!login || location.hash.length < 2) return;
    login.elements.token.value = decodeURIComponent(location.hash.slice(1));
    history.replaceState(null, "", location.pathname + location.search);
    login.requestSubmit();
  }
  enter();
  addEventListener("hashchange", enter);

  for (const chosen of document.querySelectorAll("nav [aria-current]")) {
    chosen.scrollIntoView({ block: "nearest", inline: "center" });
  }

  const busy = () => /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? "");
  let prefix = 0;

  function lines() {
    return [...document.querySelectorAll(".list tbody:not(.more) tr, .queue > li")];
  }

  function choose(step) {
    const all = lines();
    if (!all.length) return;
    const now = all.findIndex((line) => line.classList.contains("chosen"));
    const next = all[Math.min(all.length - 1, Math.max(0, now + step))];
    all[now]?.classList.remove("chosen");
    next.classList.add("chosen");
    next.querySelector("a")?.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && busy()) document.activeElement.blur();
    if (busy()) return;
    const going = Date.now() - prefix < 1500;
    prefix = 0;
    if (going) {
      const link = document.querySelector(`nav a[data-go="${CSS.escape(event.key)}"]`);
      if (link) { event.preventDefault(); location.href = link.href; }
      return;
    }
    switch (event.key) {
      case "/": document.getElementById("find")?.focus(); event.preventDefault(); break;
      case "?": document.getElementById("keys")?.showModal(); break;
      case "g": prefix = Date.now(); break;
      case "j": choose(1); break;
      case "k": choose(-1); break;
    }
  });

  // A double click submits a form once.
  document.addEventListener("submit", (event) => {
    const button = event.target.querySelector("button.danger");
    if (!button) return;
    if (button.dataset.sent) event.preventDefault();
    button.dataset.sent = "yes";
  });
  addEventListener("pageshow", () => {
    for (const button of document.querySelectorAll("button[data-sent]")) delete button.dataset.sent;
  });
})();
