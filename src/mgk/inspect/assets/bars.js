// Bars from 0, each with its name, its number and a line for its interval.

function bars({ bars: all }) {
  const most = all.reduce((a, { value, high }) => Math.max(a, value, high ?? 0), 0) || 1;
  const share = (value) => `${clamp(100 * value / most, 0, 100)}%`;
  return make("dl", { className: "barlist" }, ...all.flatMap(({ name, value, text, low, high }, s) => {
    const bar = make("span", { className: "filled" }), track = make("span", { className: "track" }, bar);
    bar.style.width = share(value);
    setSeries(bar, s);
    if (low !== null && high !== null) {
      const whisker = make("span", { className: "whisker" });
      whisker.style.left = share(low);
      whisker.style.width = share(high - low);
      track.append(whisker);
    }
    return [make("dt", { textContent: name }), make("dd", {}, track, make("b", { textContent: text }))];
  }));
}

// The colour of a series, in both themes.
function setSeries(element, s) {
  element.style.setProperty("--light", rgb(hue("light", s)));
  element.style.setProperty("--dark", rgb(hue("dark", s)));
}
