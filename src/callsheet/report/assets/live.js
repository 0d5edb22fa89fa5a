// A page that is served live asks for news, and its buttons ask the run for something.

let answered = Date.now();
let reachable = true;

function request(path, options = {}) {
  return fetch(path, { ...options, cache: "no-store", credentials: "same-origin", headers: { ...options.headers, "X-Callsheet-Token": pageData.live.token } });
}

async function poll() {
  try {
    const answer = await request(`${pageData.live.poll}?since=${encodeURIComponent(data.version)}`);
    reachable = answer.ok || answer.status === 304;
    if (answer.status === 200) { data = await answer.json(); render(); }
    if (reachable) answered = Date.now();
  } catch {
    reachable = false;
  }
  showLife();
  const pause = pageData.live.seconds * (document.hidden ? 5 : reachable ? 1 : 2);
  setTimeout(poll, 1000 * pause);
}

function showLife() {
  const dot = document.getElementById("life"), said = document.getElementById("life-said");
  if (!dot) return; // a page that is a file
  const isLive = data.run.outcome === "running";
  dot.classList.toggle("off", !reachable);
  dot.classList.toggle("over", reachable && !isLive);
  said.textContent = !reachable ? `no answer since ${moment(answered / 1000)}` : isLive ? "live" : isNumber(data.run.ended) && data.run.outcome !== "lost" ? `ended ${moment(data.run.ended)}` : `silent since ${moment(data.run.last_write)}`;
}

function why() {
  return data.no_acts ?? pageData.live.no_acts ?? "";
}

function liveControls() {
  if (pageData.live === null) return null;
  const off = why();
  const button = (act, text) => el("button", { type: "button", id: `act-${act}`, class: act, disabled: Boolean(off), on: { click: () => (act === "stop" ? confirmStop() : ask(act)) } }, text);
  return el("div", { class: "live" },
    el("span", { class: "dot", id: "life", "aria-hidden": "true" }), el("span", { class: "soft small", id: "life-said" }),
    button("save", "Save a checkpoint"), button("evaluate", "Evaluate"), button("stop", "Stop"),
    el("span", { class: "why soft small", id: "said", role: "status" }, off || said));
}

let said = "";

async function ask(act) {
  say(`Asking the run: ${act} ...`);
  try {
    const answer = await request(pageData.live.act, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ act }) });
    const text = await answer.text();
    let message = text;
    try { message = JSON.parse(text).message ?? text; } catch { /* a plain text, shown as it is */ }
    say(answer.ok ? message || `The run was asked: ${act}.` : `That did not work: ${message || answer.status}`);
  } catch {
    say("The server does not answer.");
  }
}

function say(text) {
  said = text;
  const place = document.getElementById("said");
  if (place) place.textContent = text;
}

function confirmStop() {
  const dialog = el("dialog", { "aria-labelledby": "stop-title" },
    el("h2", { id: "stop-title" }, "Stop this run?"),
    el("p", {}, `${named(data.run.name)} ends its step, does what is due at the end, and is over. It can be resumed from a checkpoint.`),
    el("form", { method: "dialog", class: "row" }, el("button", { value: "no" }, "Go on training"), el("button", { value: "stop", class: "stop", id: "confirm-stop" }, "Stop the run")));
  dialog.addEventListener("close", () => { if (dialog.returnValue === "stop") ask("stop"); dialog.remove(); });
  document.body.append(dialog);
  dialog.showModal();
}
