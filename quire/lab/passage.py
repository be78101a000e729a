"""A fixed text for perplexity: plain prose of this project's own, in no model's training data."""

PASSAGE = """\
The harbour at Vell is not large. Two stone arms reach out from the shore, one of them a little longer than the \
other, and between them there is room for perhaps thirty boats when everybody keeps to his own place. In summer \
nobody does. The fishing boats come in with the tide and tie up wherever they find a ring in the wall, the mail \
steamer wants the deep water beside the crane, and the yachts, which belong to people from the city, lie in the \
middle on long ropes and take up the space of three. So the harbour is full although, if one looks down on it from \
the church, a good half of its water is empty.

When Anna Brandt became harbour master she did what her father had done before her. Each boat that was announced got \
a stretch of the wall, as long as the longest boat of its kind, and kept it until it left. It was a fair rule and \
easy to remember. It also meant that a rowing boat might hold twenty metres of stone for a week, because its owner \
had once spoken of a schooner, and that in August she had to send away boats for which there would have been room \
ten times over. She could see the room. She could not give it to anybody, since it was cut into pieces too short for \
whoever asked, or promised to somebody who might still come.

In her second winter she painted numbers on the wall, one for every four metres, from the lighthouse round to the \
slipway. In spring she told the boats that there were no places any more, only numbers. A boat took as many as it \
needed, and not necessarily beside each other: a barge that came in two parts could lie at seven and at forty, if \
those were the ones free, and the book in her office said which was whose. When a boat grew, because another was \
lashed to its side, it took one number more. When it left, its numbers went back into the tin box on her desk, and \
whoever came next drew from the box. At worst a boat wasted the end of its last stretch, which was less than four \
metres, and on average half of that.

The old captains did not like it. A boat in two places was no boat, they said, and a book was no wall. But by July \
the harbour held fifty-one boats where it had held thirty, and nobody had been sent away since May. What surprised \
her most was something she had not planned. Three ferries came from the same company, and they carried the same \
spare anchors, the same ropes and the same crates of lamp oil, which until then each of them had stowed at its own \
place. Now they kept one set, at number twelve, and wrote number twelve into all three of their pages. Only when one \
of them wanted to paint its anchors did she make it take a set of its own first; the others should find theirs as \
they had left them.

There were bad days too. In the first storm of September everybody wanted to come in at once, and the tin box was \
empty by noon. She had thought about this. Somebody would have to go out again, and it seemed least unfair that it \
should be the one who had come last. Sometimes she let a crew row its cargo up the beach and fetch it back when the \
weather turned, which took an hour and needed the beach; sometimes it was quicker to send them out with empty hands \
and let them load a second time. She came to judge it by the weight of the cargo and the state of the road, and she \
was right more often than not.

Years later, when the harbours up and down the coast had numbers on their walls, a young man from the ministry asked \
her who had invented it. She said that nobody had. It was how a library put away its books, and how a baker cut his \
dough, and how the railway sold its seats. The only new thing had been to see that a boat does not mind where it \
lies, so long as there is a book that knows. The young man wrote this down. Then he asked whether she had any advice \
for the harbours that were still to be built. She thought about it for a while. Make the stretches short, she said, \
but not so short that you spend the day writing. And keep a few of them back in the morning, for those who are \
already inside.
"""
