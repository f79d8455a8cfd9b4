//! The agent's arguments on the kernel's command line: the balloon driver, its trackers, the
//! parameters of modules, and a root file system to continue on.

use serde::{Deserialize, Serialize};

/// Prefix of the argument that selects the balloon driver.
const BALLOON_WORD: &str = "ebb.balloon=";
/// Argument that loads the trackers of Ebb's balloon driver after it.
const TRACKERS_WORD: &str = "ebb.trackers";
/// Prefix of the argument with the device of a root file system.
const ROOT_WORD: &str = "ebb.root=";
/// The module of the trackers.
pub const TRACKERS_MODULE: &str = "ebb_trackers";

/// A driver for the balloon device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BalloonDriver {
    /// Linux's driver.
    VirtioBalloon,
    /// Ebb's driver.
    EbbBalloon,
    /// No driver.
    #[default]
    None,
}

impl BalloonDriver {
    /// All drivers.
    pub const ALL: [Self; 3] = [Self::VirtioBalloon, Self::EbbBalloon, Self::None];

    /// The name on the command line, which is also the module's name except for `none`.
    pub fn name(self) -> &'static str {
        match self {
            Self::VirtioBalloon => "virtio_balloon",
            Self::EbbBalloon => "ebb_balloon",
            Self::None => "none",
        }
    }
}

/// A kernel command line.
#[derive(Debug, Clone, Copy)]
pub struct CommandLine<'text>(&'text str);

impl<'text> CommandLine<'text> {
    /// From the text of `/proc/cmdline`.
    pub fn new(text: &'text str) -> Self {
        Self(text)
    }

    /// The balloon driver to load: Linux's by default. The last argument takes precedence.
    pub fn balloon_driver(self) -> Result<BalloonDriver, String> {
        let word = self.words().filter_map(|word| word.strip_prefix(BALLOON_WORD)).last();
        let Some(name) = word else { return Ok(BalloonDriver::VirtioBalloon) };
        BalloonDriver::ALL.into_iter().find(|driver| driver.name() == name).ok_or_else(|| {
            let names = BalloonDriver::ALL.map(BalloonDriver::name).join(", ");
            format!("{BALLOON_WORD}{name}: unknown driver; use one of {names}")
        })
    }

    /// Whether to load [`TRACKERS_MODULE`] after Ebb's balloon driver.
    pub fn trackers(self) -> bool {
        self.words().any(|word| word == TRACKERS_WORD)
    }

    /// The device of the root file system whose init takes over after the set-up; `None` to stay in
    /// the initramfs.
    pub fn root(self) -> Option<&'text str> {
        self.words().filter_map(|word| word.strip_prefix(ROOT_WORD)).last()
    }

    /// Parameters for `module` in the format of `insmod`, from all arguments
    /// `module.PARAMETER=VALUE`, as in modprobe(8).
    pub fn parameters_of(self, module: &str) -> String {
        let of_module = |word: &'text str| word.strip_prefix(module)?.strip_prefix('.');
        self.words().filter_map(of_module).collect::<Vec<_>>().join(" ")
    }

    fn words(self) -> impl Iterator<Item = &'text str> {
        self.0.split_ascii_whitespace()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_argument_selects_the_driver() {
        let driver = |text| CommandLine::new(text).balloon_driver();
        assert_eq!(driver("console=ttyS0 quiet\n"), Ok(BalloonDriver::VirtioBalloon));
        assert_eq!(driver("ebb.balloon=ebb_balloon quiet"), Ok(BalloonDriver::EbbBalloon));
        assert_eq!(driver("ebb.balloon=ebb_balloon ebb.balloon=none\n"), Ok(BalloonDriver::None));
        assert_eq!(driver("xebb.balloon=none"), Ok(BalloonDriver::VirtioBalloon));
        let error = driver("ebb.balloon=vmw_balloon").unwrap_err();
        assert!(
            error.contains("vmw_balloon") && error.contains("virtio_balloon, ebb_balloon, none"),
            "{error}"
        );
    }

    #[test]
    fn an_argument_loads_the_trackers() {
        assert!(CommandLine::new("ebb.balloon=ebb_balloon ebb.trackers\n").trackers());
        assert!(
            !CommandLine::new("ebb.balloon=ebb_balloon ebb_trackers.percpu_order=0").trackers()
        );
    }

    #[test]
    fn an_argument_names_the_root() {
        let root = |text| CommandLine::new(text).root();
        assert_eq!(root("console=ttyS0 root=/dev/vdb\n"), None);
        assert_eq!(root("ebb.root=/dev/vdb quiet ebb.root=/dev/vda\n"), Some("/dev/vda"));
    }

    #[test]
    fn parameters_go_to_the_module_they_name() {
        let text = CommandLine::new(
            "ebb_balloon.tracker=percpu ebb_balloonx.a=1 ebb.balloon=none \
             ebb_balloon.encoding=auto\n",
        );
        assert_eq!(text.parameters_of("ebb_balloon"), "tracker=percpu encoding=auto");
        assert_eq!(text.parameters_of("virtio_balloon"), "");
    }

    proptest! {
        #[test]
        fn any_text_is_parsed(text: String, module in "[a-z_]{1,8}") {
            let line = CommandLine::new(&text);
            let _ = line.balloon_driver();
            prop_assert!(line.parameters_of(&module).len() <= text.len());
        }
    }
}
