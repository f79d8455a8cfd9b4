//! The stages of a boot, from the laboratory's clock, the monitor's, and the guest's kernel log.

use crate::harness::counters::Counters;

/// Text of the line that the guest writes into its kernel log.
pub(super) const MARK: &str = "ebb-lab: mark";
/// Words that select the lines of the log that end stages, and the one with what its clock missed.
pub(super) const LOG_WORDS: [&str; 6] = [
    MARK,
    "Memory: ",
    "smp: Brought up",
    "Freeing unused kernel image (initmem)",
    "Run /init",
    "sched_clock: Marking stable",
];

/// A stage of a boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// The monitor's parts, by its own clock.
    Monitor(&'static str, &'static str),
    /// From the start of the monitor to the time at which the kernel's clock is 0.
    BeforeKernel,
    /// What the clock of the kernel's log missed: until it is known to be stable, it goes no
    /// further than one tick from the last one (Linux `sched_clock_local`), and there are none
    /// while interrupts are off.
    Missed,
    /// Between two lines of the kernel's log, each named by a word.
    Kernel(Option<&'static str>, &'static str, &'static str),
    /// From the start of init to the agent's first line: modules are loaded.
    Init,
}

impl Stage {
    /// All stages. The monitor's parts are a part of the time before the kernel's clock.
    pub(super) const ALL: [Self; 11] = [
        Self::BeforeKernel,
        Self::Monitor("isolate", "of it: the monitor enters its namespaces"),
        Self::Monitor("build", "of it: the monitor builds the machine"),
        Self::Monitor("load", "of it: the monitor loads kernel and initramfs"),
        Self::Monitor("serve", "of it: the monitor gives up its rights"),
        Self::Missed,
        Self::Kernel(None, LOG_WORDS[1], "kernel: to the end of its memory's set-up"),
        Self::Kernel(Some(LOG_WORDS[1]), LOG_WORDS[2], "kernel: to its processors"),
        Self::Kernel(Some(LOG_WORDS[2]), LOG_WORDS[3], "kernel: drivers and initramfs"),
        Self::Kernel(Some(LOG_WORDS[3]), LOG_WORDS[4], "kernel: to the start of init"),
        Self::Init,
    ];

    /// Its title.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::BeforeKernel => "from the start to the kernel's clock",
            Self::Missed => "kernel: what its clock missed in the following",
            Self::Monitor(_, title) | Self::Kernel(.., title) => title,
            Self::Init => "init: modules, to its first line",
        }
    }
}

/// The times of one boot.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Times {
    /// From the start of the monitor to the first line of the guest's init, in seconds.
    pub(super) init_s: f64,
    /// From the start of the monitor to the time 0 of the kernel's log, in seconds.
    kernel_s: f64,
    /// What the clock of the log missed, in seconds.
    missed_s: Option<f64>,
    /// Times of lines of the kernel's log, by [`LOG_WORDS`].
    lines: [Option<f64>; LOG_WORDS.len()],
    /// Seconds of the monitor's parts.
    parts: Vec<(String, f64)>,
}

impl Times {
    /// Relates the clocks: `marked_s` after the monitor's start, the guest has written the mark
    /// into its `log`. `None` if the log has no mark.
    pub(super) fn new(
        init_s: f64,
        marked_s: f64,
        log: &str,
        counters: Option<&Counters>,
    ) -> Option<Self> {
        let line =
            |word: &str| log.lines().filter_map(stamped).find(|(_, text)| text.contains(word));
        let lines = LOG_WORDS.map(|word| line(word).map(|(seconds, _)| seconds));
        let missed_s = log.lines().filter_map(stamped).find_map(|(_, text)| missed(text));
        let kernel_s = marked_s - lines[0]? - missed_s.unwrap_or(0.0);
        let parts = |counters: &Counters| {
            let part = |(name, us): (&str, f64)| {
                Some((name.strip_prefix("ebb_start_microseconds/")?.to_owned(), us / 1e6))
            };
            counters.iter().filter_map(part).collect()
        };
        let parts = counters.map(parts).unwrap_or_default();
        Some(Self { init_s, kernel_s, missed_s, lines, parts })
    }

    /// Seconds of a stage; `None` if it is not known.
    pub(super) fn seconds(&self, stage: Stage) -> Option<f64> {
        let at = |word: &str| {
            let index = LOG_WORDS.iter().position(|known| *known == word)?;
            self.lines[index]
        };
        match stage {
            Stage::BeforeKernel => Some(self.kernel_s),
            Stage::Missed => self.missed_s,
            Stage::Monitor(part, _) => {
                self.parts.iter().find(|(name, _)| name == part).map(|(_, seconds)| *seconds)
            }
            Stage::Kernel(None, to, _) => at(to),
            Stage::Kernel(Some(from), to, _) => Some(at(to)? - at(from)?),
            Stage::Init => {
                let missed_s = self.missed_s.unwrap_or(0.0);
                Some(self.init_s - self.kernel_s - missed_s - at(LOG_WORDS[4])?)
            }
        }
    }
}

/// The time stamp of a line of the kernel's log in seconds, and the text after it: `<6>[ 1.25] text`.
fn stamped(line: &str) -> Option<(f64, &str)> {
    let (_, rest) = line.split_once('[')?;
    let (stamp, text) = rest.split_once(']')?;
    Some((stamp.trim().parse().ok()?, text.trim_start()))
}

/// What the clock of the log has missed, in seconds, from the line in which the kernel finds it
/// stable: the second number after the arrow is what it is ahead of the processor's clock by, in
/// nanoseconds (Linux `sched_clock_init_late`).
fn missed(text: &str) -> Option<f64> {
    let (_, after) = text.strip_prefix(LOG_WORDS[5])?.split_once("->(")?;
    let (_, ahead_ns) = after.trim_end().strip_suffix(')')?.split_once(',')?;
    Some(-ahead_ns.trim().parse::<f64>().ok()? / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "<6>[    0.113878] Memory: 3231320K/5242484K available (14343K kernel code)\n\
                       <6>[    0.157224] smp: Brought up 1 node, 1 CPU\n\
                       <6>[    0.518343] Freeing unused kernel image (initmem) memory: 2612K\n\
                       <6>[    0.520000] sched_clock: Marking stable (416281483, \
                       44657092)->(530466230, -69527655)\n\
                       <6>[    0.527651] Run /init as init process\n\
                       <12>[    0.700000] ebb-lab: mark\n";

    #[test]
    fn stages_add_up_to_the_whole() {
        let text = "ebb_start_microseconds{kind=\"build\"} 2500\n";
        let times = Times::new(1.1, 1.2, LOG, Some(&Counters::of_monitor(text))).unwrap();
        let seconds = |stage| times.seconds(stage).unwrap();
        assert!((seconds(Stage::BeforeKernel) - (0.5 - 0.069_527_655)).abs() < 1e-9);
        assert!((seconds(Stage::Missed) - 0.069_527_655).abs() < 1e-9);
        assert!((seconds(Stage::ALL[2]) - 0.0025).abs() < 1e-9);
        assert_eq!(times.seconds(Stage::ALL[3]), None);
        let of_whole = |stage: &Stage| !matches!(stage, Stage::Monitor(..));
        let sum: f64 = Stage::ALL.into_iter().filter(of_whole).map(seconds).sum();
        assert!((sum - 1.1).abs() < 1e-9, "{sum}");
    }

    #[test]
    fn lines_without_time_stamps_are_ignored() {
        assert_eq!(stamped("<6>[    0.25] text [x]"), Some((0.25, "text [x]")));
        for line in ["", "text", "[x] text", "<6>[ 0.1"] {
            assert_eq!(stamped(line), None, "{line}");
        }
        assert_eq!(Times::new(1.0, 1.0, "<6>[ 0.1] Linux\n", None), None);
        for line in ["", "(1, 2)->(3, )", "->(1, -2", "->(1)"] {
            assert_eq!(missed(&format!("{}{line}", LOG_WORDS[5])), None, "{line}");
        }
    }
}
