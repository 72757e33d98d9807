/* A library that is no backend: it shows nothing of the name. */

extern int nothing;
__attribute__((visibility("default"))) int nothing = 1;
