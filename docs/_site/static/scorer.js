/* The order of search results: a guide before the reference, the reference before what is a log. */
var Scorer = {
  score: function (result) {
    var page = result[0], score = result[4];
    if (/^docs\/(benchmarks(\/.*)?|correctness|parity|reliability|compared|releasing|dependencies)$|^(CHANGELOG|ARCHITECTURE|CONTRIBUTING)$/.test(page))
      return score - 20;
    return /^docs\/api\//.test(page) ? score : score + 10;
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
