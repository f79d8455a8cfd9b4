//! What the kernel's command line says to the agent: which balloon driver to load, and modules'
//! parameters.

use serde::{Deserialize, Serialize};

/// The word that chooses the balloon driver.
const BALLOON_WORD: &str = "ebb.balloon=";

/// A driver for the balloon device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BalloonDriver {
    /// Linux' own.
    VirtioBalloon,
    /// Ebb's.
    EbbBalloon,
    /// No driver: the device is left alone.
    None,
}

impl BalloonDriver {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::VirtioBalloon, Self::EbbBalloon, Self::None];

    /// The name on the command line; but for `none`, the module's name too.
    pub fn name(self) -> &'static str {
        match self {
            Self::VirtioBalloon => "virtio_balloon",
            Self::EbbBalloon => "ebb_balloon",
            Self::None => "none",
        }
    }
}

/// Words of a kernel's command line.
#[derive(Debug, Clone, Copy)]
pub struct CommandLine<'text>(&'text str);

impl<'text> CommandLine<'text> {
    /// The words in the text of `/proc/cmdline`.
    pub fn new(text: &'text str) -> Self {
        Self(text)
    }

    /// The balloon driver to load: Linux' own if nothing is said. The last word counts.
    pub fn balloon_driver(self) -> Result<BalloonDriver, String> {
        let word = self.words().filter_map(|word| word.strip_prefix(BALLOON_WORD)).last();
        let Some(name) = word else { return Ok(BalloonDriver::VirtioBalloon) };
        BalloonDriver::ALL.into_iter().find(|driver| driver.name() == name).ok_or_else(|| {
            let names = BalloonDriver::ALL.map(BalloonDriver::name).join(", ");
            format!("{BALLOON_WORD}{name}: there is no such driver; there are {names}")
        })
    }

    /// Parameters for `module`, as for `insmod`: all words `module.PARAMETER=VALUE`, as modprobe(8)
    /// takes them.
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
    fn the_driver_is_chosen_by_a_word() {
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
    fn parameters_go_to_the_module_they_name() {
        let text = CommandLine::new(
            "ebb_balloon.tracker=percpu ebb_balloonx.a=1 ebb.balloon=none ebb_balloon.encoding=auto\n",
        );
        assert_eq!(text.parameters_of("ebb_balloon"), "tracker=percpu encoding=auto");
        assert_eq!(text.parameters_of("virtio_balloon"), "");
    }

    proptest! {
        #[test]
        fn any_text_is_read(text: String, module in "[a-z_]{1,8}") {
            let line = CommandLine::new(&text);
            let _ = line.balloon_driver();
            prop_assert!(line.parameters_of(&module).len() <= text.len());
        }
    }
}
