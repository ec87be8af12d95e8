"""Why a rule matters, by the numbers of the handout's requirements that it begins with."""

from __future__ import annotations

WHY = {
    "M1": "everything later is compared with this: what is wrong here is wrong everywhere",
    "M2": "the cache is what makes a token cost one position instead of all before it, and its pages are what "
          "is counted, shared and given back",
    "M3": "requests come and go at any time; one batch that waits for its longest member wastes the machine",
    "M4": "memory, not arithmetic, decides how many requests a server can serve at a time",
    "M5": "a model that is really four times smaller fits where the float one does not; a label changes nothing",
    "M6": "what happened can only be believed, explained or repaired if all of it is on the record",
    "V1": "requests share a machine, never their content: a leak from one to another is the worst fault of a server",
    "V2": "a page whose users nobody knows can be neither freed nor trusted",
    "V3": "whoever cancels has gone: every further token takes time and pages from those who wait",
    "V4": "for whoever sent it, a server that forgets a request is down, however fast it serves the others",
    "V5": "numbers that their metadata do not explain can be neither checked nor used elsewhere",
    "V6": "cache, batches and pages are there to save work; they must not change the answer",
    "B1": "what is wrong with a request is cheapest to say at the door, before it has touched anything",
    "B2": "one token is the shortest prompt there is: whatever is done before the last token is done nowhere here",
    "B3": "edge values come from real callers, who only want to know whether a prompt is accepted",
    "B4": "two requests under one id get each other's tokens",
    "B5": "a number outside the vocabulary reads another row of a table, or none",
    "B6": "positions beyond the context are such as the model was never made for",
    "B7": "most errors of paged memory live at the exact multiples of the page size",
    "B8": "ids are chosen by callers, who use them again at once",
    "B9": "memory that is used after its release belongs to somebody else by then",
    "B10": "a step without a budget comes whenever the machine is busy elsewhere; it must cost and lose nothing",
    "B11": "real loads mix long and short; the short ones must not pay for the long ones",
    "B12": "real weight matrices hold constant, zero and extreme groups",
    "B13": "a format that is half supported gives wrong numbers without a word",
    "B14": "nobody sees the order in which errors need things to happen until it happens",
    "B15": "a few requests are always much longer than the rest, and averages do not show them",
    "B16": "when something ends abnormally, what it held must come back all the same",
    "B17": "too little memory is the normal state of a busy server, and has to be survived exactly",
    "B18": "the page size is a matter of speed; no answer may depend on it",
    "B19": "what is right for one seed may be luck",
    "C4": "the exit code is all that a script or a grader sees",
    "F8": "every command, test and report starts from the fixture",
    "P": "a figure in a report is worth what it was counted from",
    "T2": "a run that cannot be repeated cannot be debugged",
    "T3": "users read text, not token numbers",
    "T6": "the timeline is the evidence for every other figure",
    "T7": "a metric that means something else than its definition misleads whoever tunes by it",
    "X2": "an engine computes; a table of answers is no engine",
    "X4": "a figure from a measuring tool that was tampered with is no figure",
}


def why(rule):
    """Of a rule such as "V1, V3: ...": the reasons of each."""
    return "; ".join(WHY[number.strip()] for number in rule.partition(":")[0].split(","))
