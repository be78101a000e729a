/* Drafts out of text that was there before, for all sequences of a step at once.
 *
 * quire/drafting/lines.py is the specification: the same in plain Python, which runs where this is not built. Both
 * compare, learn and choose in the same order and with the same arithmetic, so that they choose the same drafts.
 *
 * A text of n tokens takes 8 bytes a token, and 4 to 8 more for the heads of its chains. A line is one sequence: its
 * text, and the guess that it goes on as a source (its own text, or one of earlier answers) does from a position on. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MIN_HEADS = 256, NUM_PLACES = 20, END_OF_ANSWER = -1, NO_SCOPE = -1, NO_MEMORY = -1 };

/* drafting/native.py has the same. */
struct rules {
    double first_chances[NUM_PLACES];
    double factor, min_chance, max_chance, min_gain, record_memory, record_prior;
    int32_t gram, depth, most, max_candidates, max_walked, first_weight, max_weight, max_looked_at;
};

struct costs { /* of a step, by its number of drafts: a line with bends */
    double plain_s, more_s;
    const double *seconds;
    const int32_t *numbers;
    int32_t num_bends;
};

struct place {
    int32_t token, previous; /* the last end before this one (after this token) that has the same hash; 0: none */
};

struct text {
    struct place *places;
    int32_t *heads; /* the last end of each hash */
    int32_t num_tokens, num_places, num_heads, num_indexed, num_holders;
};

struct answers {
    struct text *young, *old;
};

struct line {
    struct text *text, *source;
    double observed, expected;
    int32_t position, num_agreed, is_unanimous, scope;
};

struct match {
    struct text *text;
    int32_t position, length, is_unanimous;
};

struct lookup {
    struct rules rules;
    double chances[NUM_PLACES];
    int32_t weights[NUM_PLACES];
    struct line *lines;
    struct answers *scopes;
    struct reach *heap;
    int32_t *taken;
    int32_t num_lines, num_scopes, heap_size;
};

/* -- texts */

static uint32_t hash(const struct text *text, int32_t end, int32_t gram) {
    uint32_t h = 0;
    for (int32_t i = end - gram; i < end; i++) h = (h ^ (uint32_t)text->places[i].token) * 0x9E3779B1u;
    return h ^ h >> 15;
}

static void enter(struct text *text, int32_t first, int32_t last, int32_t gram) {
    const uint32_t mask = (uint32_t)text->num_heads - 1;
    for (int32_t end = first; end <= last; end++) {
        int32_t *previous = &text->places[end - 1].previous;
        *previous = 0;
        if (end < gram) continue;
        int32_t *head = &text->heads[hash(text, end, gram) & mask];
        *previous = *head;
        *head = end;
    }
}

/* Takes in the ends that have a token after them: what follows the last one nobody knows yet. */
static int index_text(struct text *text, int32_t gram) {
    const int32_t first = text->num_indexed + 1, last = text->num_tokens - 1;
    if (last < first) return 0;
    if (last > text->num_heads) {
        int32_t num_heads = MIN_HEADS;
        while (num_heads < last + last / 4) num_heads *= 2;
        int32_t *heads = calloc((size_t)num_heads, sizeof *heads);
        if (heads == NULL) return NO_MEMORY;
        free(text->heads);
        text->heads = heads;
        text->num_heads = num_heads;
        enter(text, 1, last, gram);
    } else {
        enter(text, first, last, gram);
    }
    text->num_indexed = last;
    return 0;
}

static int append(struct text *text, const int32_t *tokens, int64_t count) {
    if (text->num_tokens + count > text->num_places) {
        const int64_t wanted = text->num_tokens + count + text->num_tokens / 4 + 32;
        if (wanted > 1 << 30) return NO_MEMORY;
        struct place *places = realloc(text->places, (size_t)wanted * sizeof *places);
        if (places == NULL) return NO_MEMORY;
        text->places = places;
        text->num_places = (int32_t)wanted;
    }
    for (int64_t i = 0; i < count; i++) text->places[text->num_tokens++].token = tokens[i];
    return 0;
}

/* The longest run, of at most `depth` tokens, that ends `context` and stood in `text`; of equal ones the latest. */
static struct match find(struct text *text, const struct text *context, const struct rules *rules) {
    struct match best = {NULL, 0, 0, 1};
    const int32_t size = context->num_tokens, gram = rules->gram;
    if (text == NULL || text->num_heads == 0 || size < gram) return best;
    const struct place *places = text->places, *last = context->places + size - 1;
    int32_t end = text->heads[hash(context, size, gram) & ((uint32_t)text->num_heads - 1)], following = 0, num_found = 0;
    for (int32_t i = 0; i < rules->max_walked && num_found < rules->max_candidates && end != 0; i++) {
        int32_t length = 0, most = rules->depth < end ? rules->depth : end;
        if (most > size) most = size;
        while (length < most && places[end - 1 - length].token == last[-length].token) length++;
        if (length >= gram) {
            if (num_found++ == 0) following = places[end].token;
            if (places[end].token != following) best.is_unanimous = 0;
            if (length > best.length) {
                best.text = text;
                best.position = end;
                best.length = length;
            }
        }
        end = places[end - 1].previous;
    }
    return best;
}

static struct text *hold(struct text *text) {
    if (text != NULL) text->num_holders++;
    return text;
}

static struct text *new_text(void) { return hold(calloc(1, sizeof(struct text))); }

static void release(struct text *text) {
    if (text == NULL || --text->num_holders > 0) return;
    free(text->places);
    free(text->heads);
    free(text);
}

static int take_in(struct text *text, const int32_t *tokens, int64_t count, int32_t gram) {
    return append(text, tokens, count) == 0 ? index_text(text, gram) : NO_MEMORY;
}

static int64_t num_bytes(const struct text *text) {
    return text == NULL ? 0 : 8 * (int64_t)text->num_places + 4 * (int64_t)text->num_heads;
}

/* -- one line */

static int32_t place_of(int32_t num_agreed, int32_t is_unanimous) {
    const int32_t step = num_agreed < 8 ? num_agreed : num_agreed < 16 ? 8 : 9;
    return 2 * step + is_unanimous;
}

static void follow(struct line *line, struct text *source, int32_t position, int32_t num_agreed, int32_t is_unanimous) {
    if (source != line->source) {
        hold(source);
        release(line->source);
        line->source = source;
    }
    line->position = position;
    line->num_agreed = num_agreed;
    line->is_unanimous = is_unanimous;
}

static void compare(struct lookup *lookup, struct line *line, int32_t token) {
    const struct rules *rules = &lookup->rules;
    if (line->source == NULL) return;
    const int32_t guess =
        line->position < line->source->num_tokens ? line->source->places[line->position].token : END_OF_ANSWER;
    if (guess == END_OF_ANSWER) {
        follow(line, NULL, 0, 0, 1);
        return;
    }
    const int32_t place = place_of(line->num_agreed, line->is_unanimous), is_right = guess == token;
    const double before = lookup->chances[place];
    if (lookup->weights[place] < rules->max_weight) lookup->weights[place]++;
    lookup->chances[place] += (is_right - before) / lookup->weights[place];
    line->observed = rules->record_memory * line->observed + rules->record_prior + is_right;
    line->expected = rules->record_memory * line->expected + rules->record_prior + before;
    line->position++;
    line->num_agreed = is_right ? line->num_agreed + 1 : 0;
    line->is_unanimous = is_right ? line->is_unanimous : 0;
}

static void look_up(struct lookup *lookup, struct line *line) {
    struct match best = find(line->text, line->text, &lookup->rules);
    if (line->scope != NO_SCOPE && line->scope < lookup->num_scopes) {
        const struct answers *answers = &lookup->scopes[line->scope];
        struct match other = find(answers->young, line->text, &lookup->rules);
        const struct match older = find(answers->old, line->text, &lookup->rules);
        if (older.length > other.length) other = older;
        if (other.length > best.length && other.text->places[other.position].token != END_OF_ANSWER) best = other;
    }
    if (best.text != NULL) follow(line, best.text, best.position, best.length, best.is_unanimous);
}

/* -- choosing */

struct reach { /* of one line: the chance that its next draft is reached and right */
    double chance, ratio;
    int32_t index, num_agreed, num_left, is_unanimous;
};

static int advance(const struct lookup *lookup, struct reach *reach) {
    const struct rules *rules = &lookup->rules;
    if (reach->num_left == 0) return 0;
    const double chance = reach->ratio * lookup->chances[place_of(reach->num_agreed, reach->is_unanimous)];
    reach->chance *= chance < rules->max_chance ? chance : rules->max_chance;
    reach->ratio = 1.0; /* once it was right, how many agree tells more than what the request did before */
    reach->num_agreed++;
    reach->num_left--;
    return reach->chance >= rules->min_chance;
}

static int begin_reach(const struct lookup *lookup, const struct line *line, int32_t num_unknown, struct reach *reach) {
    const struct rules *rules = &lookup->rules;
    if (line->source == NULL) return 0;
    const double wanted = rules->factor * line->num_agreed;
    int32_t most = wanted >= rules->most ? rules->most : wanted < 1.0 ? 1 : (int32_t)wanted;
    most += num_unknown;
    if (line->source != line->text) { /* an earlier answer, which may end before that */
        int32_t size = 0;
        while (size < most && line->position + size < line->source->num_tokens &&
               line->source->places[line->position + size].token != END_OF_ANSWER)
            size++;
        most = size;
    }
    if (most <= num_unknown) return 0;
    reach->chance = 1.0;
    reach->ratio = line->observed / line->expected;
    reach->num_agreed = line->num_agreed;
    reach->num_left = most;
    reach->is_unanimous = line->is_unanimous;
    for (int32_t i = 0; i <= num_unknown; i++)
        if (!advance(lookup, reach)) return 0;
    return 1;
}

static int comes_first(const struct reach *a, const struct reach *b) {
    return a->chance > b->chance || (a->chance == b->chance && a->index < b->index);
}

static void sift_down(struct reach *heap, int32_t size, int32_t at) {
    const struct reach moved = heap[at];
    for (;;) {
        int32_t child = 2 * at + 1;
        if (child >= size) break;
        if (child + 1 < size && comes_first(&heap[child + 1], &heap[child])) child++;
        if (!comes_first(&heap[child], &moved)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

static int32_t rounded(int32_t count) {
    int32_t shift = 0;
    while ((count - 1) >> shift >= 16) shift++;
    return ((count + (1 << shift) - 1) >> shift) << shift;
}

static double extra_s(const struct costs *costs, int32_t num_drafts) {
    int32_t low = 0, below = 0;
    double below_s = 0.0;
    while (low < costs->num_bends && costs->numbers[low] <= num_drafts) {
        below = costs->numbers[low];
        below_s = costs->seconds[low++];
    }
    if (low == costs->num_bends) return below_s + (num_drafts - below) * costs->more_s;
    return below_s + (costs->seconds[low] - below_s) * (num_drafts - below) / (costs->numbers[low] - below);
}

/* How many drafts to verify, in the order of their chances, so that the step brings the most tokens a second. Their
 * lines are in lookup->taken; *best_expected is how many of them should be right. */
static int32_t choose(
    struct lookup *lookup, int32_t heap_size, int32_t num_decodes, int32_t most, double trust,
    const struct costs *costs, double *best_expected) {
    struct reach *heap = lookup->heap;
    double best_rate = lookup->rules.min_gain * num_decodes / costs->plain_s, expected = 0.0, added_s = 0.0;
    *best_expected = 0.0;
    int32_t num_taken = 0, best_number = 0, kind = 0;
    for (int32_t i = heap_size / 2 - 1; i >= 0; i--) sift_down(heap, heap_size, i);
    if (most > lookup->rules.max_looked_at) most = lookup->rules.max_looked_at;
    while (heap_size > 0 && num_taken < most) {
        lookup->taken[num_taken++] = heap[0].index;
        expected += heap[0].chance;
        if (rounded(num_taken) != kind) {
            kind = rounded(num_taken);
            added_s = extra_s(costs, kind);
        }
        const double rate = (num_decodes + trust * expected) / (costs->plain_s + added_s);
        if (rate > best_rate) {
            best_rate = rate;
            best_number = num_taken;
            *best_expected = expected;
        }
        if (!advance(lookup, &heap[0])) heap[0] = heap[--heap_size];
        sift_down(heap, heap_size, 0);
    }
    return best_number;
}

/* -- the whole */

struct lookup *quire_lookup_new(const struct rules *rules) {
    struct lookup *lookup = calloc(1, sizeof *lookup);
    if (lookup == NULL) return NULL;
    lookup->rules = *rules;
    memcpy(lookup->chances, rules->first_chances, sizeof lookup->chances);
    for (int i = 0; i < NUM_PLACES; i++) lookup->weights[i] = rules->first_weight;
    lookup->taken = calloc((size_t)rules->max_looked_at, sizeof *lookup->taken);
    if (lookup->taken != NULL) return lookup;
    free(lookup);
    return NULL;
}

void quire_lookup_close(struct lookup *lookup, int32_t slot) {
    release(lookup->lines[slot].source);
    release(lookup->lines[slot].text);
    memset(&lookup->lines[slot], 0, sizeof lookup->lines[slot]);
}

/* A scope's younger answers become its older ones, and those are forgotten. */
void quire_lookup_age(struct lookup *lookup, int32_t scope) {
    if (scope >= lookup->num_scopes) return;
    struct answers *answers = &lookup->scopes[scope];
    release(answers->old);
    answers->old = answers->young;
    answers->young = NULL;
}

/* Adds to a scope's younger answers. */
int quire_lookup_remember(struct lookup *lookup, int32_t scope, const int32_t *tokens, int64_t count) {
    if (scope >= lookup->num_scopes) {
        struct answers *scopes = realloc(lookup->scopes, (size_t)(scope + 1) * sizeof *scopes);
        if (scopes == NULL) return NO_MEMORY;
        memset(scopes + lookup->num_scopes, 0, (size_t)(scope + 1 - lookup->num_scopes) * sizeof *scopes);
        lookup->scopes = scopes;
        lookup->num_scopes = scope + 1;
    }
    struct answers *answers = &lookup->scopes[scope];
    if (answers->young == NULL) answers->young = new_text();
    if (answers->young == NULL) return NO_MEMORY;
    return take_in(answers->young, tokens, count, lookup->rules.gram);
}

/* Of all texts. */
int64_t quire_lookup_bytes(const struct lookup *lookup) {
    int64_t total = 0;
    for (int32_t i = 0; i < lookup->num_lines; i++) total += num_bytes(lookup->lines[i].text);
    for (int32_t i = 0; i < lookup->num_scopes; i++)
        total += num_bytes(lookup->scopes[i].young) + num_bytes(lookup->scopes[i].old);
    return total;
}

void quire_lookup_free(struct lookup *lookup) {
    for (int32_t i = 0; i < lookup->num_lines; i++) quire_lookup_close(lookup, i);
    for (int32_t i = 0; i < lookup->num_scopes; i++) {
        release(lookup->scopes[i].young);
        release(lookup->scopes[i].old);
    }
    free(lookup->lines);
    free(lookup->scopes);
    free(lookup->heap);
    free(lookup->taken);
    free(lookup);
}

/* The slot is free, or one more than there were. */
int quire_lookup_open(struct lookup *lookup, int32_t slot, int32_t scope) {
    if (slot >= lookup->num_lines) {
        struct line *lines = realloc(lookup->lines, (size_t)(slot + 1) * sizeof *lines);
        if (lines == NULL) return NO_MEMORY;
        lookup->lines = lines;
        memset(&lines[slot], 0, sizeof *lines);
        lookup->num_lines = slot + 1;
        struct reach *heap = realloc(lookup->heap, (size_t)lookup->num_lines * sizeof *heap);
        if (heap == NULL) return NO_MEMORY;
        lookup->heap = heap;
    }
    struct line *line = &lookup->lines[slot];
    line->text = new_text();
    line->is_unanimous = 1;
    line->observed = line->expected = lookup->rules.record_prior / (1.0 - lookup->rules.record_memory);
    line->scope = scope;
    return line->text == NULL ? NO_MEMORY : 0;
}

/* Tokens that nothing was guessed of: a prompt, or what came while nobody looked. */
int quire_lookup_enter(struct lookup *lookup, int32_t slot, const int32_t *tokens, int64_t count) {
    struct line *line = &lookup->lines[slot];
    follow(line, NULL, 0, 0, 1);
    return take_in(line->text, tokens, count, lookup->rules.gram);
}

/* The new tokens of these lines, one line's after the other's, are compared with what was guessed; then the step's
 * drafts are chosen, `most` of them at most. Returns how many lines have some: `drafted` has which of those given,
 * `numbers` how many drafts, `drafts` their tokens, one line's after the other's. */
int32_t quire_lookup_step(
    struct lookup *lookup, int32_t num_lines, const int32_t *slots, const int32_t *num_new, const int32_t *num_unknown,
    const int32_t *tokens, int32_t num_decodes, int32_t most, double trust, const struct costs *costs, int32_t *drafted,
    int32_t *numbers, int32_t *drafts, double *expected) {
    const struct rules *rules = &lookup->rules;
    for (int32_t i = 0; i < num_lines; i++) {
        struct line *line = &lookup->lines[slots[i]];
        if (num_new[i] > 0) {
            for (int32_t j = 0; j < num_new[i]; j++) compare(lookup, line, tokens[j]);
            if (take_in(line->text, tokens, num_new[i], rules->gram) != 0) return NO_MEMORY;
            tokens += num_new[i];
        }
        /* Where nothing has come, it was looked up before. */
        if (line->source == NULL || (num_new[i] > 0 && line->num_agreed < rules->gram)) look_up(lookup, line);
    }
    int32_t heap_size = 0;
    for (int32_t i = 0; i < num_lines; i++) {
        lookup->heap[heap_size].index = i;
        heap_size += begin_reach(lookup, &lookup->lines[slots[i]], num_unknown[i], &lookup->heap[heap_size]);
    }
    const int32_t number = choose(lookup, heap_size, num_decodes, most, trust, costs, expected);
    if (number == 0) return 0;
    memset(numbers, 0, (size_t)num_lines * sizeof *numbers);
    for (int32_t i = 0; i < number; i++) numbers[lookup->taken[i]]++;
    int32_t num_drafted = 0;
    for (int32_t i = 0; i < num_lines; i++) {
        const int32_t size = numbers[i];
        if (size == 0) continue;
        const struct line *line = &lookup->lines[slots[i]];
        /* Where the sequence repeats itself, the guess comes to its end and goes round. */
        const int32_t round = line->source->num_tokens - line->position;
        for (int32_t j = num_unknown[i]; j < num_unknown[i] + size; j++)
            *drafts++ = line->source->places[line->position + j % round].token;
        drafted[num_drafted] = i;
        numbers[num_drafted++] = size;
    }
    return num_drafted;
}
