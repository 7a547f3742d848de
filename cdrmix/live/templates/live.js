// Follows a page: its figures are asked for anew, and its pictures where they have changed. On the
// table of runs: sorting, filters, and the choice of runs to compare.
"use strict";

const LEAST_WAIT = 2000; // ms between two requests, and at least ten times what one takes
const SLOWNESS = 10;
const order = { column: 9, descending: true }; // the newest first
const chosen = new Set();
const byId = (id) => document.getElementById(id);

function addressOf(part) {
  const address = new URL(location.href);
  address.searchParams.set("part", part);
  return address;
}

async function fetchPart(part) {
  const answer = await fetch(addressOf(part));
  if (!answer.ok) throw new Error(answer.status);
  return new DOMParser().parseFromString(await answer.text(), "text/html").body;
}

// Replaces the children that differ, so that the rest keeps its place and what is unfolded.
function replaceChanged(main, fresh) {
  const old = [...main.children];
  const now = [...fresh.children];
  now.forEach((child, place) => {
    const before = old[place];
    if (!before) return main.append(child);
    if (before.id === "status" || before.outerHTML === child.outerHTML) return;
    const folds = [...before.querySelectorAll("details")].map((each) => each.open);
    child.querySelectorAll("details").forEach((each, n) => { each.open = Boolean(folds[n]); });
    before.replaceWith(child);
  });
  old.slice(now.length).forEach((child) => child.remove());
}

async function refresh() {
  const mark = byId("status").dataset.mark;
  const status = (await fetchPart("status")).querySelector("#status");
  if (!status) return;
  byId("status").replaceWith(status);
  arrange();
  if (status.dataset.mark === mark) return;
  replaceChanged(document.querySelector("main"), await fetchPart("main"));
}

async function follow() {
  const began = performance.now();
  if (!document.hidden) {
    try {
      await refresh();
      byId("connection").hidden = true;
    } catch {
      byId("connection").hidden = false;
    }
  }
  setTimeout(follow, Math.max(LEAST_WAIT, SLOWNESS * (performance.now() - began)));
}

function sortedRows(rows) {
  const value = (row) => row.children[order.column]?.dataset.sort ?? "";
  const numbers = rows.every((row) => value(row) === "" || !isNaN(value(row)));
  const compared = (a, b) => {
    if ((value(a) === "") !== (value(b) === "")) return value(a) === "" ? 1 : -1; // unknown last
    const sign = numbers ? value(a) - value(b) : value(a).localeCompare(value(b));
    return order.descending ? -sign : sign;
  };
  return rows.sort(compared);
}

function arrange() {
  const body = document.querySelector(".runs tbody");
  if (!body) return;
  const words = byId("words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const state = byId("state").value;
  const rows = sortedRows([...body.rows]);
  for (const row of rows) {
    const text = `${row.dataset.key} ${row.cells[2].textContent}`.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word)) || (state !== "" && row.dataset.state !== state);
    const box = row.querySelector("input");
    if (box) box.checked = chosen.has(box.value);
  }
  body.append(...rows);
  document.querySelectorAll(".runs th").forEach((head, column) => {
    if (column === order.column) head.ariaSort = order.descending ? "descending" : "ascending";
    else head.removeAttribute("aria-sort");
  });
  const shown = rows.filter((row) => !row.hidden).length;
  byId("count").textContent = shown === rows.length ? `${rows.length} runs` : `${shown} of ${rows.length} runs`;
  const most = Number(byId("compare").dataset.most);
  byId("compare").disabled = chosen.size < 2 || chosen.size > most;
  byId("compare").textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
}

document.addEventListener("click", (event) => {
  const head = event.target.closest("button[data-column]");
  if (!head) return;
  const column = Number(head.dataset.column);
  order.descending = column === order.column ? !order.descending : false;
  order.column = column;
  arrange();
});
document.addEventListener("input", (event) => {
  if (event.target.name === "run") {
    if (event.target.checked) chosen.add(event.target.value);
    else chosen.delete(event.target.value);
  }
  arrange();
});
// Enter in the filter is no wish to compare.
document.addEventListener("keydown", (event) => {
  if (event.target.id === "words" && event.key === "Enter") event.preventDefault();
});

arrange();
if (byId("status")) setTimeout(follow, LEAST_WAIT);
