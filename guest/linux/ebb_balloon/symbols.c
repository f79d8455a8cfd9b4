// SPDX-License-Identifier: GPL-2.0-only
/*
 * Addresses of kernel functions that are not exported.
 *
 * kallsyms_lookup_name() is not available to modules, but a kprobe is given
 * by name and, once registered, has the address. It is registered disabled:
 * no instruction of the kernel is changed.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/security.h>

#include "symbols.h"

static bool direct = true;
module_param(direct, bool, 0444);
MODULE_PARM_DESC(direct,
		 "use functions that the kernel does not export, to take free blocks without clearing them (default Y)");

struct ebb_symbols ebb_symbols;

static DEFINE_MUTEX(ebb_symbols_mutex);
/* Result of the look-up, under the mutex. */
static enum { EBB_NOT_TRIED, EBB_FOUND, EBB_REFUSED } ebb_symbols_state;

/* Return: NULL if the kernel has no such function, or no kprobes. */
static void *ebb_symbol(const char *name)
{
	struct kprobe probe = {
		.symbol_name = name,
		.flags = KPROBE_FLAG_DISABLED,
	};
	void *address;

	if (register_kprobe(&probe))
		return NULL;
	address = probe.addr;
	unregister_kprobe(&probe);
	/* That may be behind an ENDBR, where a call that is not checked may go as well. */
	return address;
}

/*
 * Where the processor checks the targets of indirect calls, a function whose address the kernel
 * itself never takes has no valid beginning: it was sealed at boot.
 */
static bool ebb_calls_are_checked(void)
{
#ifdef CONFIG_X86_KERNEL_IBT
	if (cpu_feature_enabled(X86_FEATURE_IBT))
		return true;
#endif
	return IS_ENABLED(CONFIG_CFI_CLANG) || IS_ENABLED(CONFIG_CFI);
}

/* Return: NULL, or why the functions are not used. */
static const char *ebb_symbols_look_up(void)
{
	struct ebb_symbols found;

	if (!direct)
		return "parameter direct=0";
	if (ebb_calls_are_checked())
		return "this kernel checks indirect calls";
	if (security_locked_down(LOCKDOWN_KPROBES))
		return "this kernel is locked down";
	found.isolate_free_page = ebb_symbol("__isolate_free_page");
	if (!found.isolate_free_page)
		return "this kernel has no __isolate_free_page(), or no kprobes";
	found.putback_isolated_page = ebb_symbol("__putback_isolated_page");
	if (!found.putback_isolated_page)
		return "this kernel has no __putback_isolated_page()";
	found.migratetype = ebb_symbol(EBB_MIGRATETYPE_FUNCTION);
	if (!found.migratetype)
		return "this kernel has no " EBB_MIGRATETYPE_FUNCTION "()";
	found.drain_all_pages = ebb_symbol("drain_all_pages");
	if (!found.drain_all_pages)
		return "this kernel has no drain_all_pages()";
	ebb_symbols = found;
	return NULL;
}

int ebb_symbols_find(void)
{
	const char *reason;
	bool found;

	mutex_lock(&ebb_symbols_mutex);
	if (ebb_symbols_state == EBB_NOT_TRIED) {
		reason = ebb_symbols_look_up();
		ebb_symbols_state = reason ? EBB_REFUSED : EBB_FOUND;
		if (reason)
			pr_info("blocks come from alloc_pages(): %s\n", reason);
	}
	found = ebb_symbols_state == EBB_FOUND;
	mutex_unlock(&ebb_symbols_mutex);
	return found ? 0 : -EOPNOTSUPP;
}
