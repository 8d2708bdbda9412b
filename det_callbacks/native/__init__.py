"""The native recorder's C++ sources, and how they become a library."""
