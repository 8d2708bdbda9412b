"""Two run folders become one verdict: the judge, and a run that is verified while it trains."""
