// A live page polls its server. Each page defines `liveStatus`, which returns whether a run is running, and a text to show.

let lastAnswer = Date.now(); // when the server last answered
let reachable = true; // whether the server answered the latest poll

function request(path, options = {}) {
  return fetch(path, { ...options, cache: "no-store", credentials: "same-origin", headers: { ...options.headers, "X-Callsheet-Token": pageData.live.token } });
}

/** Whether the reader is pressing or dragging something in the page, which an update would replace. */
const isBusy = () => main.matches(":active");

/** Renders new data and keeps the scroll position of what the reader looks at, even if the content above it grows. */
function renderInPlace() {
  const anchor = document.elementFromPoint(innerWidth / 2, innerHeight / 3)?.closest(".chart-card, section");
  const before = anchor?.getBoundingClientRect().top;
  render(true);
  const current = anchor?.isConnected ? anchor : document.getElementById(anchor?.id); // the section may have been replaced
  if (current) scrollBy({ top: current.getBoundingClientRect().top - before, behavior: "instant" });
}

async function poll() {
  try {
    const answer = await request(`${pageData.live.poll}?since=${encodeURIComponent(data.version)}`);
    reachable = answer.ok || answer.status === 304;
    if (answer.status === 200) {
      const newData = await answer.json();
      if (!isBusy()) { data = newData; renderInPlace(); } // if busy, `data` keeps its version, so the next poll gets the new data again
    }
    if (reachable) lastAnswer = Date.now();
  } catch {
    reachable = false;
  }
  updateStatus();
  // Poll less often while the page is hidden or the server does not answer.
  const pause = pageData.live.seconds * (document.hidden ? 5 : reachable ? 1 : 2);
  setTimeout(poll, 1000 * pause);
}

/** The elements that show the status of a live page: a dot and a text. */
const statusIndicator = () => [el("span", { class: "dot", id: "status-dot", "aria-hidden": "true" }), el("span", { class: "soft small", id: "status-text" })];

function updateStatus() {
  const dot = document.getElementById("status-dot");
  if (!dot) return;
  const [isRunning, text] = liveStatus();
  dot.classList.toggle("off", !reachable);
  dot.classList.toggle("ended", reachable && !isRunning);
  document.getElementById("status-text").textContent = reachable ? text : `no answer since ${dateTime(lastAnswer / 1000)}`;
}

/** Starts polling if the page has a server. */
function startPolling() {
  if (pageData.live === null) return;
  document.documentElement.style.overflowAnchor = "none"; // `renderInPlace` keeps the scroll position instead, in all browsers
  setTimeout(poll, 1000 * pageData.live.seconds);
}
