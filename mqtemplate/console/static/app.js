// The scripts of the dashboard: every page works without them, except the live tail.
"use strict";

// --- parts that take long to read ---------------------------------------------------------------

// The server renders and escapes each part, as it does the pages.
async function loadParts(root) {
  const parts = [...root.querySelectorAll("[data-src]")];
  await Promise.all(parts.map(async (part) => {
    const address = part.dataset.src;
    part.removeAttribute("data-src");
    const response = await fetch(address, { headers: { Accept: "text/html" } });
    if (response.ok) {
      part.innerHTML = await response.text();
      nameCells(part);
      await loadParts(part);
    } else {
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      part.textContent = page.querySelector(".note")?.textContent ?? `the server answers ${response.status}`;
      part.className = "note bad";
    }
    part.removeAttribute("aria-busy");
    showTimes(part);
  }));
}

// --- tables on a phone --------------------------------------------------------------------------

// A row becomes a card, in which each cell has the title of its column before it. The style sheet shows it.
function nameCells(root) {
  for (const table of root.querySelectorAll("table")) {
    if (!table.tHead) continue;
    table.classList.add("cards");
    for (const row of table.tBodies[0].rows) nameRow(row, table);
  }
}

function nameRow(row, table) {
  const titles = table.tHead.rows[0].cells;
  for (const cell of row.cells) {
    const title = cell.colSpan > 1 ? "" : titles[cell.cellIndex]?.textContent.trim();
    if (title) cell.dataset.title = title;
    cell.classList.toggle("blank", !cell.textContent.trim() && !cell.querySelector("input, button, select, svg"));
  }
}

// --- pages that stay current --------------------------------------------------------------------

// Elements with data-live are replaced by the same ones of the page as it is now.
async function refresh() {
  const response = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!response.ok) return;
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  for (const old of document.querySelectorAll("[data-live]")) {
    const now = page.getElementById(old.id);
    if (now) nameCells(now);
    if (now && !old.contains(document.activeElement)) old.replaceWith(document.adoptNode(now));
  }
  if (!page.body.dataset.refresh) delete document.body.dataset.refresh;
}

function hasOpenMenu() {
  return "popover" in HTMLElement.prototype && document.querySelector(":popover-open") !== null;
}

async function keepCurrent() {
  const seconds = Number(document.body.dataset.refresh);
  if (!seconds) return;
  try {
    if (!document.hidden && !hasOpenMenu()) {
      await refresh();
      showTimes(document);
    }
  } finally {
    setTimeout(keepCurrent, seconds * 1000);
  }
}

// --- spans of time ------------------------------------------------------------------------------

// The server knows its own time zone only: tonight and tomorrow are those of the reader.
const SPANS = {
  "next hour": (now) => [now, new Date(now.getTime() + 3600000)],
  "tonight": (now) => (now.getHours() < 6 ? [day(now, 0), day(now, 0, 6)] : [day(now, 0, 18), day(now, 1, 6)]),
  "tomorrow": (now) => [day(now, 1), day(now, 2)],
  "this week": (now) => [now, day(now, 7 - ((now.getDay() + 6) % 7))],
  "30 days": (now) => [now, day(now, 30, now.getHours())],
};

function day(now, days, hours = 0) {
  return new Date(now.getFullYear(), now.getMonth(), now.getDate() + days, hours);
}

function setSpans() {
  for (const link of document.querySelectorAll("a[data-span]")) {
    const [from, to] = SPANS[link.dataset.span](new Date());
    const address = new URL(link.href);
    address.searchParams.set("from", from.getTime());
    address.searchParams.set("to", to.getTime());
    link.href = address.href;
  }
}

// --- the switch of the theme --------------------------------------------------------------------

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  remember("theme", root.dataset.theme);
}

function remember(name, value) {
  const path = document.body.dataset.mount || "/";
  document.cookie = `mqtemplate_${name}=${value}; Path=${path}; Max-Age=31536000; SameSite=Strict`;
}

// --- the zone of times --------------------------------------------------------------------------

// The server writes times in its zone. A page shows them in that one, in UTC, or in the zone of the browser.
const ZONES = ["server", "utc", "browser"];
const FULL_TIME = /^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$/;
const pad = (number) => String(number).padStart(2, "0");

function zone() {
  const found = document.cookie.match(/mqtemplate_times=(\w+)/)?.[1];
  return ZONES.includes(found) ? found : "server";
}

function isoIn(moment, where) {
  if (where === "utc") return moment.toISOString().slice(0, 19);
  const day = [moment.getFullYear(), pad(moment.getMonth() + 1), pad(moment.getDate())].join("-");
  return `${day}T${[moment.getHours(), moment.getMinutes(), moment.getSeconds()].map(pad).join(":")}`;
}

function showTimes(root) {
  const where = zone();
  for (const each of root.querySelectorAll("time[datetime]")) {
    if (!FULL_TIME.test(each.textContent)) continue;
    const iso = where === "server" ? each.dateTime.slice(0, 19) : isoIn(new Date(each.dateTime), where);
    each.textContent = iso.replace("T", " ");
  }
  for (const each of root.querySelectorAll("input[data-ms]")) {
    if (!each.dataset.ms) continue;
    each.dataset.server ??= each.value;
    each.value = where === "server" ? each.dataset.server : isoIn(new Date(Number(each.dataset.ms)), where);
  }
  for (const each of root.querySelectorAll("[data-zone]")) {
    const names = { server: each.dataset.zone, utc: "UTC", browser: Intl.DateTimeFormat().resolvedOptions().timeZone };
    each.textContent = names[where] + (where === "browser" ? " (this browser)" : "");
  }
}

function switchTimes() {
  remember("times", ZONES[(ZONES.indexOf(zone()) + 1) % ZONES.length]);
  showTimes(document);
}

// A time that is typed is in the zone that is shown: the server gets epoch milliseconds.
document.addEventListener("formdata", (event) => {
  const where = zone();
  if (where === "server") return;
  for (const each of event.target.querySelectorAll("input[data-ms]")) {
    if (each.value) event.formData.set(each.name, String(Date.parse(each.value + (where === "utc" ? "Z" : ""))));
  }
});

// --- forms --------------------------------------------------------------------------------------

function tickAll(box) {
  for (const other of box.closest("table").querySelectorAll("tbody input[type=checkbox]")) other.checked = box.checked;
  countTicked();
}

function countTicked() {
  for (const place of document.querySelectorAll("[data-ticked]")) {
    const count = document.querySelectorAll("tbody input[type=checkbox]:checked").length;
    place.textContent = count ? `${count} chosen` : "none chosen";
  }
}

function addProperty(button) {
  const body = button.closest("form").querySelector("table.properties tbody");
  const row = body.querySelector("tr.new").cloneNode(true);
  for (const field of row.querySelectorAll("input")) field.value = "";
  body.append(row);
  row.querySelector("input").focus();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-do]");
  if (!button) return;
  if (button.dataset.do === "theme") switchTheme();
  if (button.dataset.do === "times") switchTimes();
  if (button.dataset.do === "keys") document.getElementById("keys").showModal();
  if (button.dataset.do === "add-property") addProperty(button);
  if (button.dataset.do === "remove-property") button.closest("tr").remove();
  if (button.dataset.do === "pause-tail") pauseTail(button);
  if (button.dataset.do === "clear-tail") document.querySelector(".tail tbody").replaceChildren();
});

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-tick-all]")) tickAll(event.target);
  else if (event.target.matches("input[type=checkbox]")) countTicked();
  if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
});

document.addEventListener("submit", (event) => {
  // A second click on a button must not send a change twice.
  if (event.target.method !== "post") return;
  setTimeout(() => event.target.querySelectorAll("button").forEach((button) => { button.disabled = true; }));
});

// --- the keyboard -------------------------------------------------------------------------------

const PAGES = { o: "/", d: "/delayed", m: "/messages", t: "/topics", g: "/groups", x: "/dead-letters", l: "/listeners" };
let goes = false;

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const row = document.activeElement?.closest("tbody tr");
  if (goes) {
    goes = false;
    const path = PAGES[event.key];
    if (path) location.href = (document.body.dataset.mount || "") + path;
  } else if (event.key === "g") {
    goes = true;
    setTimeout(() => { goes = false; }, 1500);
  } else if (event.key === "/") {
    document.querySelector("main input:not([type=hidden]):not([type=checkbox])")?.focus();
    event.preventDefault();
  } else if (event.key === "s") {
    document.getElementById("find")?.focus();
    event.preventDefault();
  } else if (event.key === "j" || event.key === "k") {
    const next = row ? (event.key === "j" ? row.nextElementSibling : row.previousElementSibling)
      : document.querySelector("main tbody tr");
    next?.querySelector("a, input, button")?.focus();
  } else if (event.key === "?") {
    document.getElementById("keys").showModal();
  }
});

// --- the live tail ------------------------------------------------------------------------------

const MAX_ROWS = 500;
let isPaused = false;

function pauseTail(button) {
  isPaused = !isPaused;
  button.textContent = isPaused ? "Continue" : "Pause";
}

function cell(row, text, name) {
  const cell = row.insertCell();
  cell.textContent = text;
  if (name) cell.className = name;
  return cell;
}

function followTopic(table) {
  const rows = table.tBodies[0];
  const state = document.getElementById("tail-state");
  const stream = new EventSource(table.dataset.stream);
  const show = (text, kind) => { state.textContent = text; state.className = `mark ${kind}`; };
  stream.onopen = () => show("live", "good");
  stream.onerror = () => show("connecting …", "warn");
  stream.addEventListener("failed", (event) => {
    show(JSON.parse(event.data).text, "bad");
    stream.close();
  });
  stream.addEventListener("skipped", (event) => {
    cell(rows.insertRow(0), `${JSON.parse(event.data).count} more messages in this second`, "soft").colSpan = 5;
  });
  stream.addEventListener("message", (event) => {
    if (isPaused) return;
    const message = JSON.parse(event.data);
    const row = rows.insertRow(0);
    const time = document.createElement("time");
    time.dateTime = message.exact;
    time.textContent = message.time;
    cell(row, "", "mono").append(time);
    showTimes(row);
    const link = document.createElement("a");
    link.href = `${table.dataset.message}?${new URLSearchParams({ id: message.id, topic: message.topic })}`;
    link.textContent = message.keys || message.id;
    cell(row, "").append(link);
    cell(row, message.tag);
    cell(row, message.queue, "wide soft");
    cell(row, message.body, "mono break");
    nameRow(row, table);
    while (rows.rows.length > MAX_ROWS) rows.deleteRow(-1);
  });
}

// On a phone the menu is a row that scrolls.
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
setSpans();
nameCells(document);
loadParts(document);
if (document.body.dataset.refresh) setTimeout(keepCurrent, Number(document.body.dataset.refresh) * 1000);
document.querySelectorAll("[data-stream]").forEach(followTopic);
if (zone() !== "server") showTimes(document);
