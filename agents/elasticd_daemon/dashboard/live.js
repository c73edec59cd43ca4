// Loads this page again every few seconds and replaces the parts that have changed. All markup is made, and escaped, by
// the agent. A hidden tab sends no requests.
"use strict";

(() => {
  const PATIENCE_MS = 15000, SLOWEST_MS = 20000;
  const sign = document.getElementById("live"), word = document.getElementById("live-text");
  const everyMs = 1000 * Number(sign.dataset.every);
  let failures = 0, answeredAt = Date.now(), timer = 0, loading = false;

  const show = (on, text) => {
    sign.className = on ? "live on" : "live off";
    if (word.textContent !== text) word.textContent = text;
  };

  // A log keeps its scroll position, and stays at its end.
  const atEnd = (pre) => pre.scrollHeight - pre.scrollTop - pre.clientHeight < 30;
  const scrolls = (part) => [...part.querySelectorAll("pre")].map((pre) => [pre.scrollTop, atEnd(pre)]);
  const scrollBack = (part, before) => part.querySelectorAll("pre").forEach((pre, i) => {
    const [top, end] = before[i] || [0, pre.hasAttribute("data-end")];
    pre.scrollTop = end && pre.hasAttribute("data-end") ? pre.scrollHeight : top;
  });

  const replace = (fresh) => {
    for (const old of document.querySelectorAll("[data-live]")) {
      const part = fresh.getElementById(old.id);
      if (part === null || kept.get(old.id) === part.outerHTML || isSelected(old)) continue;
      kept.set(old.id, part.outerHTML);
      const open = new Set([...old.querySelectorAll("details[open]")].map((one) => one.id));
      const focused = [...old.querySelectorAll("a, summary, button, pre")].indexOf(document.activeElement);
      const before = scrolls(old);
      old.replaceChildren(...[...part.childNodes].map((node) => document.importNode(node, true)));
      old.className = part.className;
      old.querySelectorAll("details").forEach((one) => { one.open = open.has(one.id); });
      scrollBack(old, before);
      if (focused >= 0) old.querySelectorAll("a, summary, button, pre")[focused]?.focus({ preventScroll: true });
    }
    document.title = fresh.title;
    document.getElementById("which")?.querySelectorAll("select").forEach((one) => more(one, fresh));
  };

  // Selected text is not replaced.
  const isSelected = (part) => {
    const selection = document.getSelection();
    return selection !== null && !selection.isCollapsed && part.contains(selection.anchorNode);
  };

  // Add new ranks; the selection stays.
  const more = (select, fresh) => {
    const there = fresh.querySelector(`#which select[name=${select.name}]`);
    for (const option of [...(there?.options || [])].slice(select.options.length)) {
      select.append(document.importNode(option, true));
    }
  };

  const kept = new Map();

  const load = async () => {
    if (loading || document.hidden) return;
    loading = true;
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
      answeredAt = Date.now();
      show(true, fresh.getElementById("live-text")?.textContent || "");
    } catch (error) {
      failures += 1;
      const since = Math.round((Date.now() - answeredAt) / 1000);
      const why = error instanceof TypeError || error.name === "AbortError" ? "the agent does not answer" : error.message;
      show(false, `${why}; as of ${since} s ago`);
    } finally {
      clearTimeout(late);
      loading = false;
      clearTimeout(timer);
      timer = setTimeout(load, Math.min(Math.max(SLOWEST_MS, everyMs), everyMs * (1 + failures / 2)));
    }
  };

  document.getElementById("which")?.addEventListener("change", (event) => event.currentTarget.submit());
  document.querySelectorAll("pre[data-end]").forEach((pre) => { pre.scrollTop = pre.scrollHeight; });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) load(); });
  document.querySelectorAll("[data-live]").forEach((part) => kept.set(part.id, part.outerHTML));
  show(true, word.textContent);
  timer = setTimeout(load, everyMs);
})();
