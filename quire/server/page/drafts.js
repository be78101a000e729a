// The text of an answer as its steps brought it: what was drafted and accepted is marked.
import { el, number } from "./dom.js";

export class Drafts {
  /** It stands before `place` once there is something to show. */
  constructor(place) {
    this.place = place;
    this.pieces = []; // { text, share }, the share of its tokens that were drafted
    this.numShown = 0;
    this.numTokens = 0;
    this.numAccepted = 0;
  }

  /** A piece of the answer, and the usage up to it. */
  add(text, usage) {
    const numAccepted = usage?.completion_tokens_details?.accepted_prediction_tokens ?? 0;
    const numNew = (usage?.completion_tokens ?? 0) - this.numTokens;
    const share = numNew > 0 ? Math.max(0, numAccepted - this.numAccepted) / numNew : 0;
    this.pieces.push({ text, share });
    this.numTokens += numNew;
    this.numAccepted = numAccepted;
  }

  /** The pieces that have come since the last time. */
  show() {
    if (!this.numAccepted) return;
    if (!this.view) {
      this.summary = el("summary");
      this.text = el("p");
      this.view = el("details", { className: "drafts", open: true }, this.summary, this.text);
      this.place.before(this.view);
    }
    for (const { text, share } of this.pieces.slice(this.numShown)) {
      if (share) {
        const mark = el("mark", { title: "drafted and accepted, but for its last token" }, text);
        mark.style.setProperty("--share", share.toFixed(2));
        this.text.append(mark);
      } else this.text.append(text);
    }
    this.numShown = this.pieces.length;
    this.summary.textContent = `${number(this.numAccepted)} of ${number(this.numTokens)} tokens were drafted and accepted`;
  }

  /** The answer is complete: of its drafts, so many were verified. */
  end(usage) {
    if (!this.view) return;
    const details = usage?.completion_tokens_details;
    const numDrafted = (details?.accepted_prediction_tokens ?? 0) + (details?.rejected_prediction_tokens ?? 0);
    if (numDrafted) this.summary.textContent += `, of ${number(numDrafted)} that were drafted`;
    this.view.open = false;
  }
}
