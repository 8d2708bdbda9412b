"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  if (!data.maps || !data.maps.length) return;
  const STATES = { m: "match", o: "origin: it starts here", c: "carried on", r: "replayed", ".": "not compared" };
  const KINDS = ["content", "argument", "structure", "only in the reference", "only in the current run"];
  const ROLES = [["starts", "starts here"], ["carried", "carried on"], ["differs", "start not proven"]];
  const MOST = 200;
  const heat = document.getElementById("heat");
  const pointed = document.getElementById("pointed");
  const listing = document.getElementById("listing");
  const heading = document.getElementById("cell");
  const which = document.getElementById("which");
  // one of these each time, as toLocaleString makes it, would take longer than all else
  const format = new Intl.NumberFormat("en");
  const shown = (number) => (number < 1000 ? String(number) : format.format(number));
  const count = (number, noun) => `${shown(number)} ${noun}${number === 1 ? "" : "s"}`;

  for (const map of data.maps)
    for (const name of ["modules", "phases"])
      for (const kind of ["compared", "differing", "starting"])
        map[name][kind] = map[name][kind].map((pairs) => {
          const row = [];
          for (let index = 0; index < pairs.length; index += 2) row.push(...Array(pairs[index + 1]).fill(pairs[index]));
          return row;
        });

  let now = { map: 0, view: "modules" };
  let anchors = [];
  let held = { row: 0, column: 0 };
  let chosen = null;
  let ring = null;
  let mark = null;

  const stepsOf = ([first, last]) => (first === last ? `step ${first}` : `steps ${first} to ${last}`);
  const place = (map, view, row, column) => {
    const one = data.maps[map];
    const who = data.maps.length > 1 ? `rank ${one.rank}${one.fit ? `, fit ${one.fit}` : ""}, ` : "";
    return `${who}${stepsOf(one.columns[column])}, ${data[view][row]}`;
  };
  const outcome = (map, view, row, column) => {
    const cells = data.maps[map][view];
    const state = cells.states[row][column];
    const differing = cells.differing[row][column];
    const compared = cells.compared[row][column];
    const numbers = differing
      ? `; ${shown(differing)} of ${count(Math.max(compared, differing), "site")} differ${differing === 1 ? "s" : ""}`
      : compared ? `; ${count(compared, "site")} agree${compared === 1 ? "s" : ""}` : "";
    return `${STATES[state]}${numbers}`;
  };
  const describe = (map, view, row, column) => `${place(map, view, row, column)}: ${outcome(map, view, row, column)}`;
  const link = (map, view, row, column) => `#at-${map}-${view}-${row}-${column}`;

  function shorten(label, most) {
    return label.length <= most ? label : `\u2026${label.slice(label.length - most + 1)}`;
  }

  function draw() {
    const { map, view } = now;
    const one = data.maps[map];
    const rows = data[view];
    const numRows = rows.length;
    const numColumns = one.columns.length;
    const longest = Math.max(...rows.map((label) => label.length));
    const most = heat.clientWidth < 600 ? 16 : 40;
    const left = Math.ceil(Math.min(longest, most) * 6.9 + 14);
    const room = Math.max(240, heat.clientWidth - left - 14);
    const cellWidth = Math.max(4.5, Math.min(56, Math.floor((2 * room) / numColumns) / 2));
    const cellHeight = numRows <= 30 ? 22 : numRows <= 60 ? 16 : 13;
    const fontSize = numRows <= 60 ? 12 : 10.5;
    const points = { m: [], o: [], c: [], r: [], ".": [] };
    for (let row = 0; row < numRows; row += 1)
      for (let column = 0; column < numColumns; column += 1)
        points[one[view].states[row][column]].push({ row, column });
    const gap = cellWidth < 9 ? 0.5 : 1;
    const shared = {
      x: "column", y: "row", inset: gap, rx: cellWidth < 9 ? 0 : 2,
      href: (point) => link(map, view, point.row, point.column),
    };
    const widest = Math.max(...one.columns.map(([first]) => String(first).length));
    const least = (widest * 8 + 18) / cellWidth;
    const every = [1, 2, 5, 10, 20, 25, 50, 100].find((number) => number >= least) || 200;
    const ticks = one.columns.map((_, index) => index).filter((index) => index % every === 0);
    const middle = { x: "column", y: "row", pointerEvents: "none", ariaHidden: true };
    const svg = Plot.plot({
      width: left + cellWidth * numColumns + 14,
      height: 40 + cellHeight * numRows + 4,
      marginLeft: left, marginTop: 40, marginRight: 14, marginBottom: 4,
      x: { type: "band", domain: one.columns.map((_, index) => index), padding: 0, round: false, axis: null },
      y: { type: "band", domain: rows.map((_, index) => index), padding: 0, round: false, axis: null },
      marks: [
        Plot.axisX(ticks, { anchor: "top", label: "step", labelAnchor: "left", labelArrow: "none", tickSize: 4, tickFormat: (index) => String(one.columns[index][0]), fontSize: 12 }),
        Plot.axisY({ label: null, tickSize: 0, tickFormat: (index) => shorten(rows[index], most), fontSize, title: (index) => rows[index] }),
        Plot.cell(points["."], { ...shared, fill: "var(--page)", stroke: "var(--line)", strokeWidth: 0.75 }),
        Plot.cell(points.m, { ...shared, fill: "var(--match)" }),
        Plot.cell(points.r, { ...shared, fill: "var(--replayed)" }),
        Plot.cell(points.c, { ...shared, fill: "var(--carried)" }),
        Plot.cell(points.o, { ...shared, fill: "var(--origin)" }),
        cellWidth < 12 ? null : Plot.text(points["."], { ...middle, text: () => "\u2013", fill: "var(--quiet)", fontSize: 11 }),
        Plot.dot(points.o, { ...middle, symbol: "diamond", r: Math.max(3.2, Math.min(6, cellWidth / 3.4, cellHeight / 3)), fill: "var(--on-origin)", stroke: "var(--origin)", strokeWidth: 1 }),
      ],
    });
    svg.setAttribute("role", "group");
    svg.setAttribute("aria-label", `Heat map of steps and ${view}`);
    svg.setAttribute("aria-describedby", "map-help");
    anchors = rows.map(() => []);
    for (const anchor of svg.querySelectorAll("a")) {
      const address = anchor.getAttribute("href") || anchor.getAttributeNS("http://www.w3.org/1999/xlink", "href");
      const [, , , row, column] = address.split("-");
      anchor.setAttribute("href", address);
      anchor.setAttribute("tabindex", "-1");
      // Plot's own channel labels the rectangle in it, which never has the focus
      anchor.setAttribute("aria-label", describe(map, view, Number(row), Number(column)));
      anchor.dataset.row = row;
      anchor.dataset.column = column;
      anchors[row][column] = anchor;
    }
    const add = (name) => {
      const rect = drawn("rect", name);
      rect.setAttribute("visibility", "hidden");
      svg.append(rect);
      return rect;
    };
    const inside = ({ row, column }) => ({
      x: left + column * cellWidth + gap, y: 40 + row * cellHeight + gap, width: cellWidth - 2 * gap, height: cellHeight - 2 * gap,
    });
    // one path for all cells: a pattern would be drawn anew for each of them, and printing 20,000 takes minutes
    svg.append(path("hatch", points.c.map(inside).map(hatch).join("")), path("dots", points.r.map(inside).map(dots).join("")));
    mark = add("chosen");
    ring = add("ring");
    heat.replaceChildren(svg);
    hold(Math.min(held.row, numRows - 1), Math.min(held.column, numColumns - 1));
    showChosen();
  }

  function drawn(tag, name) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    made.setAttribute("class", name);
    return made;
  }

  function path(name, outline) {
    const made = drawn("path", name);
    made.setAttribute("d", outline);
    return made;
  }

  function hatch({ x, y, width, height }) {
    let lines = "";
    for (let start = 4 - height; start < width; start += 8) {
      const from = Math.max(0, start);
      const to = Math.min(width, start + height);
      if (to > from) lines += `M${x + from} ${y + height - (from - start)}L${x + to} ${y + height - (to - start)}`;
    }
    return lines;
  }

  function dots({ x, y, width, height }) {
    let squares = "";
    const across = Math.max(1, Math.floor(width / 6));
    const down = Math.max(1, Math.floor(height / 6));
    for (let row = 0; row < down; row += 1)
      for (let column = 0; column < across; column += 1)
        squares += `M${x + ((column + 0.5) * width) / across - 1} ${y + ((row + 0.5) * height) / down - 1}h2v2h-2z`;
    return squares;
  }

  function surround(rect, anchor, by) {
    const cell = anchor && anchor.querySelector("rect");
    rect.setAttribute("visibility", cell ? "visible" : "hidden");
    if (!cell) return;
    for (const [name, change] of [["x", -by], ["y", -by], ["width", 2 * by], ["height", 2 * by]])
      rect.setAttribute(name, Number(cell.getAttribute(name)) + change);
    rect.setAttribute("rx", 2);
  }

  function showChosen() {
    const here = chosen && chosen.map === now.map && chosen.view === now.view;
    surround(mark, here ? anchors[chosen.row][chosen.column] : null, 1);
  }

  function hold(row, column) {
    const before = (anchors[held.row] || [])[held.column];
    if (before) before.setAttribute("tabindex", "-1");
    held = { row, column };
    const anchor = anchors[row][column];
    anchor.setAttribute("tabindex", "0");
    return anchor;
  }

  function list(map, view, row, column) {
    const one = data.maps[map];
    const [first, last] = one.columns[column];
    const rowOf = view === "modules" ? 0 : 1;
    const found = data.entries.filter(
      (entry) => entry[0] === map && entry[1] >= first && entry[1] <= last && data.sites[entry[2]][rowOf] === row);
    const differing = one[view].differing[row][column];
    const text = outcome(map, view, row, column);
    const parts = [element("p", `${text[0].toUpperCase()}${text.slice(1)}.`)];
    if (found.length) parts.push(table(found.slice(0, MOST), first !== last));
    const left = differing - Math.min(found.length, MOST);
    if (left > 0) parts.push(element("p", `and ${count(left, "more differing site")} that this file does not list; see det-callbacks show of either run with --step ${first}, and diff --json for the verdict`, "quiet small"));
    const back = element("a", "Back to the heat map");
    back.href = "#map";
    back.className = "screen";
    back.addEventListener("click", (event) => { event.preventDefault(); comeBack(); });
    parts.push(element("p", back, "back"));
    heading.textContent = `Sites of ${place(map, view, row, column)}`;
    listing.replaceChildren(...parts);
  }

  function table(entries, withSteps) {
    const scroll = element("div", null, "scroll");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "Differing sites of the cell");
    const names = [...(withSteps ? ["step"] : []), "state", "phase", "module", "op or name", "tensor", "reference", "current", "kind", "source"];
    const head = element("tr");
    for (const name of names) {
      const cell = element("th", name, name === "step" ? "n" : "");
      cell.scope = "col";
      head.append(cell);
    }
    const body = element("tbody");
    for (const [, step, number, kind, role, ours, theirs] of entries) {
      const site = data.sites[number];
      const [name, text] = ROLES[role];
      const state = element("span", null, `state ${name}`);
      state.append(element("i"), text);
      const row = element("tr");
      if (withSteps) row.append(element("td", String(step), "n"));
      row.append(element("td", state), element("td", data.phases[site[1]]), element("td", moduleText(data.texts[site[2]])));
      row.append(element("td", element("code", siteText(site))), element("td", data.texts[site[8]], "tensor"));
      for (const digest of [ours, theirs])
        row.append(element("td", digest ? element("code", digest, "digest") : element("span", "none", "quiet")));
      row.append(element("td", KINDS[kind]), element("td", element("code", site[10].map((line) => data.texts[line]).join("\n"), "lines")));
      body.append(row);
    }
    const whole = element("table");
    const top = element("thead");
    top.append(head);
    whole.append(top, body);
    scroll.append(whole);
    return scroll;
  }

  function moduleText(name) {
    if (name === "") return element("span", "(outside any module)", "quiet");
    return name === "?" ? element("span", "(module not known)", "quiet") : element("code", name);
  }

  function siteText(site) {
    const [, , , op, occurrence, output, role, name, , recomputed] = site;
    if (!data.texts[op]) return `${data.texts[role] === "named" ? "" : `${data.texts[role]} `}${data.texts[name] || "(made outside the trace)"}`;
    return `${data.texts[op]}#${occurrence}${output ? ` output ${output}` : ""}${data.texts[role] === "argument" ? " argument" : ""}${data.texts[name] ? ` [${data.texts[name]}]` : ""}${recomputed ? " (recomputed)" : ""}`;
  }

  function element(tag, content, name) {
    const made = document.createElement(tag);
    if (content !== null && content !== undefined) made.append(content);
    if (name) made.className = name;
    return made;
  }

  function choose(map, view, row, column) {
    if (map !== now.map || view !== now.view) {
      now = { map, view };
      if (which) which.value = String(map);
      document.querySelector(`input[name=view][value=${view}]`).checked = true;
      held = { row, column };
      draw();
    }
    chosen = { map, view, row, column };
    hold(row, column);
    showChosen();
    list(map, view, row, column);
  }

  function comeBack() {
    if (chosen && (chosen.map !== now.map || chosen.view !== now.view)) choose(chosen.map, chosen.view, chosen.row, chosen.column);
    const anchor = anchors[held.row][held.column];
    anchor.focus();
    anchor.scrollIntoView({ block: "center", inline: "nearest" });
  }

  function follow() {
    const known = /^#at-(\d+)-(modules|phases)-(\d+)-(\d+)$/.exec(location.hash);
    if (!known) return false;
    const [map, row, column] = [known[1], known[3], known[4]].map(Number);
    if (!data.maps[map] || row >= data[known[2]].length || column >= data.maps[map].columns.length) return false;
    choose(map, known[2], row, column);
    heading.scrollIntoView({ block: "start" });
    heading.focus({ preventScroll: true });
    return true;
  }

  function firstDifference() {
    for (const state of ["o", "c"]) {
      let found = null;
      data.maps.forEach((one, map) => {
        const states = one.modules.states;
        const column = Math.min(...states.map((row) => row.indexOf(state)).filter((at) => at >= 0));
        if (column === Infinity) return;
        const step = one.columns[column][0];
        if (!found || step < found.step)
          found = { step, at: [map, "modules", states.findIndex((row) => row[column] === state), column] };
      });
      if (found) return found.at;
    }
    return null;
  }

  heat.addEventListener("keydown", (event) => {
    const anchor = event.target.closest && event.target.closest("a");
    if (!anchor || event.ctrlKey || event.metaKey || event.altKey) return;
    let { row, column } = held;
    const lastRow = anchors.length - 1;
    const lastColumn = anchors[0].length - 1;
    const moves = {
      ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0],
      PageDown: [10, 0], PageUp: [-10, 0], Home: [0, -Infinity], End: [0, Infinity],
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    row = Math.max(0, Math.min(lastRow, row + move[0]));
    column = Math.max(0, Math.min(lastColumn, column + move[1]));
    hold(row, column).focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && document.getElementById("cell-section").contains(document.activeElement)) comeBack();
  });
  heat.addEventListener("click", (event) => {
    const anchor = event.target.closest && event.target.closest("a");
    // the address stays the same when a cell is chosen again, and then nothing would happen
    if (anchor && anchor.getAttribute("href") === location.hash) { event.preventDefault(); follow(); }
  });
  const point = (event) => {
    const anchor = event.target.closest && event.target.closest("a");
    if (anchor) pointed.textContent = describe(now.map, now.view, Number(anchor.dataset.row), Number(anchor.dataset.column));
  };
  heat.addEventListener("pointerover", point);
  heat.addEventListener("focusin", (event) => {
    point(event);
    const anchor = event.target.closest && event.target.closest("a");
    if (!anchor) return;
    hold(Number(anchor.dataset.row), Number(anchor.dataset.column));
    surround(ring, anchor.matches(":focus-visible") ? anchor : null, 2);
  });
  heat.addEventListener("focusout", () => surround(ring, null, 2));
  for (const input of document.querySelectorAll("input[name=view]"))
    input.addEventListener("change", () => { now = { ...now, view: input.value }; held = { row: 0, column: 0 }; draw(); });
  if (which) which.addEventListener("change", () => { now = { ...now, map: Number(which.value) }; draw(); });
  let width = heat.clientWidth;
  window.addEventListener("resize", () => {
    if (Math.abs(heat.clientWidth - width) > 4) { width = heat.clientWidth; draw(); }
  });
  window.addEventListener("hashchange", follow);

  draw();
  if (!follow()) {
    const start = firstDifference();
    if (start) choose(...start);
  }
})();
