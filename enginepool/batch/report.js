"use strict";
// What a spot of a chart tells when it is pointed at. The page is complete without it.
const planes = JSON.parse(document.getElementById("planes").textContent);
const tip = document.getElementById("tip");
const find = (plane, x, lane, slack) => {
  let best = null, nearest = slack;
  for (const spot of plane.spots) {
    if (spot[2] !== lane) continue;
    const distance = Math.max(spot[0] - x, x - spot[1], 0);
    if (distance <= nearest) { best = spot; nearest = distance; }
    if (distance === 0) break;
  }
  return best;
};
const show = (event) => {
  const box = event.currentTarget.getBoundingClientRect();
  const plane = planes[event.currentTarget.dataset.plane];
  const x = (event.clientX - box.left) / box.width * 1000;
  const lane = Math.min(plane.lanes - 1, Math.floor((event.clientY - box.top) / box.height * plane.lanes));
  const spot = find(plane, x, lane, 2000 / box.width);
  tip.hidden = spot === null;
  if (spot === null) return;
  tip.textContent = spot[3];
  const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18;
  const fits = below + tip.offsetHeight < window.innerHeight;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = (fits ? below : event.clientY - tip.offsetHeight - 12) + "px";
};
for (const svg of document.querySelectorAll("svg[data-plane]")) {
  if (!(svg.dataset.plane in planes)) continue;
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
}
