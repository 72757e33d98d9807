#pragma once

/* tests/unit/kv/cmocka_all.h - cmocka and what it wants included first. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
