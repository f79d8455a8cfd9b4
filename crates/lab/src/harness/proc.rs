//! Reading the files of `/proc`: pure parsers, documented in proc(5).

use std::collections::BTreeMap;

use crate::harness::maps::Mapping;

/// Fields of `/proc/meminfo` in kB (which are KiB), by name.
///
/// Lines that are not `Name: number kB` are ignored; counts such as `HugePages_Total` are included
/// unchanged.
pub fn meminfo(text: &str) -> BTreeMap<&str, u64> {
    text.lines().filter_map(field_kib).collect()
}

/// `Name:   123 kB` as a name and a number.
fn field_kib(line: &str) -> Option<(&str, u64)> {
    let (name, rest) = line.split_once(':')?;
    let number = rest.split_ascii_whitespace().next()?.parse().ok()?;
    Some((name.trim(), number))
}

/// Free pages in the lists of processors (`pagesets` of `/proc/zoneinfo`), in KiB.
pub fn free_in_lists_kib(zoneinfo: &str) -> u64 {
    const PAGE_KIB: u64 = 4;
    let counts = zoneinfo.lines().filter_map(|line| line.trim_start().strip_prefix("count:"));
    counts.filter_map(|count| count.trim().parse::<u64>().ok()).sum::<u64>() * PAGE_KIB
}

/// Memory of a process in `/proc/PID/status`, in KiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Resident memory: anonymous, file and shared.
    pub resident_kib: u64,
    /// Anonymous memory in swap.
    pub swapped_kib: u64,
}

impl ProcessMemory {
    /// The process's memory on the host, resident or swapped: swapping a page out does not return
    /// it.
    pub fn footprint_kib(self) -> u64 {
        self.resident_kib + self.swapped_kib
    }
}

/// `VmRSS` and `VmSwap` of `/proc/PID/status`; `None` for a process without memory (a zombie).
pub fn status(text: &str) -> Option<ProcessMemory> {
    let fields: BTreeMap<&str, u64> = text.lines().filter_map(field_kib).collect();
    Some(ProcessMemory {
        resident_kib: *fields.get("VmRSS")?,
        swapped_kib: fields.get("VmSwap").copied().unwrap_or(0),
    })
}

/// The mappings of `/proc/PID/smaps` in the order of their addresses, each with its resident part
/// in KiB.
pub fn smaps(text: &str) -> Vec<(Mapping, u64)> {
    let mut mappings: Vec<(Mapping, u64)> = Vec::new();
    for line in text.lines() {
        if let Some(mapping) = Mapping::parse(line) {
            mappings.push((mapping, 0));
        } else if let (Some((_, resident_kib)), Some(("Rss", number))) =
            (mappings.last_mut(), field_kib(line))
        {
            *resident_kib = number;
        }
    }
    mappings
}

/// Resident memory of a monitor without the RAM of its guest, in KiB.
///
/// Guest RAM differs from all other parts of a monitor: its mappings have at least an eighth of the
/// guest's size (RAM of a 5 GiB guest is one of 3 GiB below the hole and one of 2 GiB above 4 GiB).
pub fn monitor_resident_kib(mappings: &[(Mapping, u64)], guest_mib: u64) -> u64 {
    let guest_ram_bytes = (guest_mib << 20) / 8;
    let others = mappings.iter().filter(|(it, _)| it.end - it.start < guest_ram_bytes);
    others.map(|(_, resident_kib)| resident_kib).sum()
}

/// The part of a guest's resident RAM in huge pages (`AnonHugePages` of `/proc/PID/smaps`), in
/// percent; guest RAM is found as by [`monitor_resident_kib`].
pub fn huge_percent(smaps: &str, guest_mib: u64) -> Option<f64> {
    let guest_ram_bytes = (guest_mib << 20) / 8;
    let (mut is_ram, mut resident_kib, mut huge_kib) = (false, 0, 0);
    for line in smaps.lines() {
        if let Some(mapping) = Mapping::parse(line) {
            is_ram = mapping.end - mapping.start >= guest_ram_bytes;
        } else if is_ram {
            match field_kib(line) {
                Some(("Rss", kib)) => resident_kib += kib,
                Some(("AnonHugePages", kib)) => huge_kib += kib,
                _ => {}
            }
        }
    }
    (resident_kib > 0).then(|| huge_kib as f64 / resident_kib as f64 * 100.0)
}

/// Pages of a huge page.
pub const HUGE_PAGE_PAGES: u64 = 512;

/// Huge pages of anonymous memory in `/proc/PID/smaps_rollup`.
pub fn huge_pages(smaps_rollup: &str) -> Option<u64> {
    const HUGE_PAGE_KIB: u64 = 2048;
    let mut fields = smaps_rollup.lines().filter_map(field_kib);
    fields.find_map(|(name, kib)| (name == "AnonHugePages").then_some(kib / HUGE_PAGE_KIB))
}

/// Free memory of `/proc/buddyinfo` in blocks below an order, in KiB.
pub fn free_below_order_kib(text: &str, order: usize) -> u64 {
    const PAGE_KIB: u64 = 4;
    text.lines()
        .filter_map(|line| line.split_once(", zone "))
        .flat_map(|(_node, rest)| rest.split_ascii_whitespace().skip(1).take(order).enumerate())
        .filter_map(|(order, count)| count.parse::<u64>().ok()?.checked_mul(PAGE_KIB << order))
        .fold(0, u64::saturating_add)
}

/// Whether a socket listens on a TCP port, in the text of `/proc/PID/net/tcp` (IPv4).
pub fn listens(text: &str, port: u16) -> bool {
    // Number, local address and port in hexadecimal digits, the remote ones, state: 0A is LISTEN
    // (include/net/tcp_states.h).
    const LISTEN: &str = "0A";
    let port = format!(":{port:04X}");
    text.lines().any(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let local = words.next().unwrap_or_default();
        local.ends_with(&port) && words.nth(1) == Some(LISTEN)
    })
}

/// Processor time of a process in `/proc/PID/stat`, threads that have ended included, in ms.
pub fn process_cpu_ms(text: &str) -> Option<f64> {
    /// Clock ticks of user space on x86 are hundredths of a second (USER_HZ).
    const TICK_MS: f64 = 10.0;
    let mut times = stat_fields(text, 14)?.map(str::parse::<f64>);
    let (user, system) = (times.next()?.ok()?, times.next()?.ok()?);
    Some((user + system) * TICK_MS)
}

/// Parent of a process in `/proc/PID/stat`.
pub fn parent(text: &str) -> Option<u32> {
    stat_fields(text, 4)?.next()?.parse().ok()
}

/// Page faults of a process in `/proc/PID/stat` that needed no I/O, those of a guest at its memory
/// included.
pub fn minor_faults(text: &str) -> Option<u64> {
    stat_fields(text, 10)?.next()?.parse().ok()
}

/// The same for page faults that have waited for a disk.
pub fn major_faults(text: &str) -> Option<u64> {
    stat_fields(text, 12)?.next()?.parse().ok()
}

/// The fields of `/proc/PID/stat` from number `first` on, which is after the name (proc(5)).
fn stat_fields(text: &str, first: usize) -> Option<impl Iterator<Item = &str>> {
    // The name, in parentheses, may contain parentheses; after it follows the state, which is field
    // 3.
    let (_, fields) = text.rsplit_once(')')?;
    Some(fields.split_ascii_whitespace().skip(first - 3))
}

/// Times of a thread in `/proc/PID/schedstat` (Linux Documentation/scheduler/sched-stats.rst).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadTimes {
    /// On a processor, ns.
    pub running_ns: u64,
    /// Runnable but waiting for a processor, ns.
    pub waiting_ns: u64,
}

/// The times in the text of `/proc/PID/schedstat`.
pub fn schedstat(text: &str) -> Option<ThreadTimes> {
    let mut times = text.split_ascii_whitespace().map(str::parse);
    Some(ThreadTimes { running_ns: times.next()?.ok()?, waiting_ns: times.next()?.ok()? })
}

/// The number in a line `NAME NUMBER`, as in `/proc/PID/ksm_stat`.
pub fn named_number(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()?.trim_end_matches(':') == name).then(|| words.next()?.parse().ok())?
    })
}

/// The name of the first processor in `/proc/cpuinfo`.
pub fn cpu_name(text: &str) -> Option<&str> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == "model name").then(|| value.trim())
    })
}

/// Swap devices and files of `/proc/swaps`, in the order of the file.
pub fn swaps(text: &str) -> Vec<String> {
    // The first line is a heading; blanks in a path are written \040, and do not occur in a
    // device's.
    text.lines()
        .skip(1)
        .filter_map(|line| line.split_ascii_whitespace().next())
        .map(|path| path.replace("\\040", " "))
        .collect()
}

/// Number of entries of a list such as `/sys/devices/system/node/has_memory`: `0-1,4` are three.
pub fn list_length(text: &str) -> u32 {
    text.trim()
        .split(',')
        .filter_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
            Some(last.checked_sub(first)?.saturating_add(1))
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SMAPS: &str = "\
55d0a8c00000-55d0a8e00000 r-xp 00000000 00:01 1234                       /bin/ebb with blank
Size:               2048 kB
KernelPageSize:        4 kB
Rss:                1500 kB
VmFlags: rd ex mr mw me
7f0000000000-7f0040000000 rw-p 00000000 00:00 0
Size:            1048576 kB
Rss:              204800 kB
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
Size:                132 kB
Rss:                  20 kB
";

    #[test]
    fn meminfo_by_name() {
        let fields = meminfo(
            "MemTotal:       16384 kB\nHugePages_Total:       3\nbroken line\nSwapFree: x kB\n",
        );
        assert_eq!(fields.get("MemTotal"), Some(&16384));
        assert_eq!(fields.get("HugePages_Total"), Some(&3));
        assert_eq!(fields.len(), 2);
    }

    #[test]
    fn status_of_a_process_and_of_a_zombie() {
        let memory = status("Name:\tebb\nVmRSS:\t  2048 kB\nVmSwap:\t    12 kB\n").unwrap();
        assert_eq!(memory, ProcessMemory { resident_kib: 2048, swapped_kib: 12 });
        assert_eq!(memory.footprint_kib(), 2060);
        assert_eq!(status("Name:\tebb\nState:\tZ (zombie)\n"), None);
    }

    #[test]
    fn smaps_mappings_with_names() {
        let mappings = smaps(SMAPS);
        assert_eq!(mappings.len(), 3);
        assert_eq!(mappings[0].0.name, "/bin/ebb with blank");
        assert_eq!((mappings[1].0.name.as_str(), mappings[1].1), ("", 204_800));
        assert_eq!(mappings[2].0.start, 0x7ffc_0000_0000);
    }

    #[test]
    fn the_monitor_is_everything_except_guest_ram() {
        assert_eq!(monitor_resident_kib(&smaps(SMAPS), 1024), 1520);
        // A guest so large that the mapping cannot be its RAM: everything is the monitor's.
        assert_eq!(monitor_resident_kib(&smaps(SMAPS), 16 * 1024), 206_320);
    }

    #[test]
    fn huge_pages_are_those_of_guest_ram() {
        let text = SMAPS
            .replace("Rss:               1500", "AnonHugePages:     1024")
            .replace("Rss:              204800 kB", "Rss: 204800 kB\nAnonHugePages: 51200 kB");
        assert_eq!(huge_percent(&text, 1024), Some(25.0));
        assert_eq!(huge_percent(SMAPS, 1024), Some(0.0));
        assert_eq!(huge_percent(SMAPS, 16 * 1024), None);
    }

    #[test]
    fn fragments_are_the_free_blocks_below_an_order() {
        let text = "Node 0, zone      DMA      1      0      2      5\nNode 0, zone   Normal     \
                    10      1      0      0\n";
        assert_eq!(free_below_order_kib(text, 0), 0);
        assert_eq!(free_below_order_kib(text, 1), 44);
        assert_eq!(free_below_order_kib(text, 3), 44 + 8 + 32);
        assert_eq!(free_below_order_kib("rubbish", 9), 0);
    }

    #[test]
    fn swaps_and_lists_and_cpu_names() {
        let text = "Filename\t\t\t\tType\t\tSize\n/dev/vda partition 1\n/a\\040b file 2\n";
        assert_eq!(swaps(text), ["/dev/vda", "/a b"]);
        assert_eq!(swaps(""), Vec::<String>::new());
        assert_eq!(list_length("0\n"), 1);
        assert_eq!(list_length("0-1,4"), 3);
        assert_eq!(list_length(""), 0);
        assert_eq!(
            cpu_name("processor : 0\nmodel name\t: AMD EPYC\nmodel name : other"),
            Some("AMD EPYC")
        );
        assert_eq!(cpu_name("processor : 0\n"), None);
    }

    #[test]
    fn listening_ports_are_distinguished_from_connected_ones() {
        let text = "  sl  local_address rem_address   st tx_queue\n\
                    \x20  0: 020012C6:115C 00000000:0000 0A 00000000:00000000\n\
                    \x20  1: 020012C6:115D 010012C6:9C40 01 00000000:00000000\n";
        assert!(listens(text, 0x115c));
        assert!(!listens(text, 0x115d) && !listens(text, 0x15c) && !listens("rubbish", 1));
    }

    #[test]
    fn processor_time_and_faults_are_found_after_any_name() {
        let text = "12 (a) b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0";
        assert_eq!(process_cpu_ms(text), Some(3000.0));
        assert_eq!(parent("12 (a) b) S 7 12"), Some(7));
        assert_eq!(minor_faults(text), Some(7));
        assert_eq!((process_cpu_ms("12 (a) S 1"), minor_faults("12 (a) S 1")), (None, None));
    }

    #[test]
    fn times_and_named_numbers() {
        let times = ThreadTimes { running_ns: 2_035_816, waiting_ns: 71_964_035 };
        assert_eq!(schedstat("2035816 71964035 188\n"), Some(times));
        assert_eq!(schedstat("2035816"), None);
        let text = "ksm_rmap_items 12\nksm_zero_pages 0\nksm_process_profit -768\n";
        assert_eq!(named_number(text, "ksm_rmap_items"), Some(12));
        assert_eq!(
            (named_number(text, "ksm_process_profit"), named_number(text, "ksm")),
            (None, None)
        );
    }

    #[test]
    fn huge_pages_of_a_process() {
        let text = "Rss:  9000 kB\nAnonHugePages:      6144 kB\nShmemPmdMapped:   0 kB\n";
        assert_eq!((huge_pages(text), huge_pages("Rss: 1 kB\n")), (Some(3), None));
    }

    #[test]
    fn the_files_of_this_process_parse() {
        let own = status(&std::fs::read_to_string("/proc/self/status").unwrap()).unwrap();
        assert!(own.resident_kib > 0);
        let mappings = smaps(&std::fs::read_to_string("/proc/self/smaps").unwrap());
        assert!(
            mappings.iter().any(|(mapping, resident)| mapping.name == "[stack]" && *resident > 0)
        );
        assert!(meminfo(&std::fs::read_to_string("/proc/meminfo").unwrap())["MemTotal"] > 0);
    }

    proptest! {
        #[test]
        fn no_text_makes_a_parser_fail(text in "(\\PC{0,20}[:\\-\n ]){0,40}") {
            meminfo(&text);
            status(&text);
            swaps(&text);
            list_length(&text);
            listens(&text, 80);
            process_cpu_ms(&text);
            free_below_order_kib(&text, 9);
            schedstat(&text);
            named_number(&text, "x");
            prop_assert!(smaps(&text).iter().all(|(mapping, _)| mapping.start <= mapping.end));
        }

        #[test]
        fn written_fields_are_read_back(total in 0..u64::MAX, free in 0..u64::MAX) {
            let text = format!("MemTotal: {total} kB\nMemFree:\t{free} kB\n");
            let fields = meminfo(&text);
            prop_assert_eq!(fields["MemTotal"], total);
            prop_assert_eq!(fields["MemFree"], free);
        }

        #[test]
        fn the_parts_of_a_process_add_up(
            sizes in prop::collection::vec((1..4096u64, 0..4096u64), 1..20),
        ) {
            let mapping = |size_mib: u64| {
                Mapping::parse(&format!("0-{:x} rw-p 0 00:00 0", size_mib << 20)).unwrap()
            };
            let mappings: Vec<(Mapping, u64)> =
                sizes.iter().map(|&(size_mib, resident)| (mapping(size_mib), resident)).collect();
            let all: u64 = mappings.iter().map(|(_, resident)| resident).sum();
            let monitor = monitor_resident_kib(&mappings, 4096);
            let guest: u64 =
                sizes.iter().filter(|(size_mib, _)| *size_mib >= 512).map(|(_, it)| it).sum();
            prop_assert_eq!(monitor + guest, all);
        }
    }
}
