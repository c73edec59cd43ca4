// Asks for this very page again every few seconds and replaces the parts that have changed. Everything that is shown was
// written, and escaped, by the agent: nothing here makes markup. While nobody looks, nobody asks.
"use strict";

(() => {
  const PATIENCE_MS = 15000, SLOWEST_MS = 20000;
  const sign = document.getElementById("live"), word = document.getElementById("live-text");
  const everyMs = 1000 * Number(sign.dataset.every);
  let failures = 0, heard = Date.now(), timer = 0, asking = false;

  const told = (on, text) => {
    sign.className = on ? "live on" : "live off";
    if (word.textContent !== text) word.textContent = text;
  };

  // A log stays where somebody has scrolled to, and at its end if that is where it was.
  const atEnd = (pre) => pre.scrollHeight - pre.scrollTop - pre.clientHeight < 30;
  const scrolls = (part) => [...part.querySelectorAll("pre")].map((pre) => [pre.scrollTop, atEnd(pre)]);
  const scrollBack = (part, before) => part.querySelectorAll("pre").forEach((pre, i) => {
    const [top, end] = before[i] || [0, pre.hasAttribute("data-end")];
    pre.scrollTop = end && pre.hasAttribute("data-end") ? pre.scrollHeight : top;
  });

  const replace = (fresh) => {
    for (const old of document.querySelectorAll("[data-live]")) {
      const part = fresh.getElementById(old.id);
      if (part === null || kept.get(old.id) === part.outerHTML || chosen(old)) continue;
      kept.set(old.id, part.outerHTML);
      const open = new Set([...old.querySelectorAll("details[open]")].map((one) => one.id));
      const focused = [...old.querySelectorAll("a, summary, pre")].indexOf(document.activeElement);
      const before = scrolls(old);
      old.replaceChildren(...[...part.childNodes].map((node) => document.importNode(node, true)));
      old.className = part.className;
      old.querySelectorAll("details").forEach((one) => { one.open = open.has(one.id); });
      scrollBack(old, before);
      if (focused >= 0) old.querySelectorAll("a, summary, pre")[focused]?.focus({ preventScroll: true });
    }
    document.title = fresh.title;
    document.getElementById("which")?.querySelectorAll("select").forEach((one) => more(one, fresh));
  };

  // What somebody is about to copy is not taken away from under them.
  const chosen = (part) => {
    const selection = document.getSelection();
    return selection !== null && !selection.isCollapsed && part.contains(selection.anchorNode);
  };

  // Ranks that came since; what is chosen stays chosen.
  const more = (select, fresh) => {
    const there = fresh.querySelector(`#which select[name=${select.name}]`);
    for (const option of [...(there?.options || [])].slice(select.options.length)) {
      select.append(document.importNode(option, true));
    }
  };

  const kept = new Map();

  const ask = async () => {
    if (asking || document.hidden) return;
    asking = true;
    const cut = new AbortController();
    const late = setTimeout(() => cut.abort(), PATIENCE_MS);
    try {
      const reply = await fetch(location.pathname + location.search, {
        headers: { Accept: "text/html" }, cache: "no-store", redirect: "error", signal: cut.signal,
      });
      if (reply.status === 401) { location.reload(); return; }
      const fresh = new DOMParser().parseFromString(await reply.text(), "text/html");
      if (!reply.ok) throw new Error(fresh.querySelector(".banner")?.textContent || `the agent answers ${reply.status}`);
      replace(fresh);
      failures = 0;
      heard = Date.now();
      told(true, fresh.getElementById("live-text")?.textContent || "");
    } catch (error) {
      failures += 1;
      const since = Math.round((Date.now() - heard) / 1000);
      const why = error instanceof TypeError || error.name === "AbortError" ? "the agent does not answer" : error.message;
      told(false, `${why}; as of ${since} s ago`);
    } finally {
      clearTimeout(late);
      asking = false;
      clearTimeout(timer);
      timer = setTimeout(ask, Math.min(Math.max(SLOWEST_MS, everyMs), everyMs * (1 + failures / 2)));
    }
  };

  document.getElementById("which")?.addEventListener("change", (event) => event.currentTarget.submit());
  document.querySelectorAll("pre[data-end]").forEach((pre) => { pre.scrollTop = pre.scrollHeight; });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  document.querySelectorAll("[data-live]").forEach((part) => kept.set(part.id, part.outerHTML));
  told(true, word.textContent);
  timer = setTimeout(ask, everyMs);
})();
