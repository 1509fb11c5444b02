// The program in whose name precompiled.hpp is compiled; it does nothing else.
int main() {}
