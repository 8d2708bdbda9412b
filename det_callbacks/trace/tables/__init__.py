"""Tables of facts about ops."""
