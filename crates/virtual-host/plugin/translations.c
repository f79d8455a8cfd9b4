// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
/*
 * A plugin of QEMU's emulator that makes its table of translated blocks large from the start, so
 * that it never grows while guests run.
 *
 * QEMU's processors are interrupted for a moment whenever the table grows, and such an interruption
 * may break a guest of an emulated KVM; CONTRIBUTING.md has the reason.
 *
 * The functions of qemu-plugin.h are QEMU's plugin API. The table and the function that resizes it
 * are not, but every QEMU that loads plugins exports them (include/exec/tb-context.h,
 * include/qemu/qht.h): where one is missing, nothing is done.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Four blocks share a bucket of 64 bytes: 64 MiB. A GiB of code has 1.8 million blocks. */
#define BLOCKS (1u << 22)

/* TBContext, whose first member is the table. */
extern char tb_ctx[] __attribute__((weak));
extern bool qht_resize(void *table, size_t elements) __attribute__((weak));

extern void qemu_plugin_register_vcpu_init_cb(uint64_t id, void (*callback)(uint64_t, unsigned));
extern void qemu_plugin_register_flush_cb(uint64_t id, void (*callback)(uint64_t));

/* The oldest version of the API that QEMU 8.1 to 11 accept has all that is used here. */
__attribute__((visibility("default"))) int qemu_plugin_version = 2;

static void grow(void)
{
	if (tb_ctx && qht_resize)
		qht_resize(tb_ctx, BLOCKS);
}

static void processor_starts(uint64_t id, unsigned processor)
{
	(void)id;
	(void)processor;
	grow();
}

/* All translations were discarded, and the table has its first size again. */
static void flushed(uint64_t id)
{
	(void)id;
	grow();
}

__attribute__((visibility("default"))) int qemu_plugin_install(uint64_t id, const void *info,
							       int argc, char **argv)
{
	(void)info;
	(void)argc;
	(void)argv;
	qemu_plugin_register_vcpu_init_cb(id, processor_starts);
	qemu_plugin_register_flush_cb(id, flushed);
	return 0;
}
