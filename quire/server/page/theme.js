// Runs before the first paint, so that the page does not flash in the other theme.
"use strict";
{
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const names = { auto: "Auto", light: "Light", dark: "Dark" };

  const chosen = () => {
    try {
      const kept = localStorage.getItem("quire-theme");
      return kept in names ? kept : "auto";
    } catch {
      return "auto"; // storage may be switched off
    }
  };
  const apply = () => {
    const choice = chosen();
    const theme = choice === "auto" ? (dark.matches ? "dark" : "light") : choice;
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme-button");
    if (button) {
      button.textContent = names[choice];
      button.title = "Theme: " + (choice === "auto" ? "as the system" : choice);
      button.setAttribute("aria-label", button.title);
    }
    dispatchEvent(new CustomEvent("quire-theme"));
  };
  apply();
  dark.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme-button").addEventListener("click", () => {
      const order = Object.keys(names);
      const next = order[(order.indexOf(chosen()) + 1) % order.length];
      try {
        localStorage.setItem("quire-theme", next);
      } catch {
        document.documentElement.dataset.theme = next;
      }
      apply();
    });
  });
}
