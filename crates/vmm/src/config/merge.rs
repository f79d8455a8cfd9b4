//! Configuration of same-page merging (docs/merging.md).

use std::path::{Path, PathBuf};
use std::str::FromStr;

use ebb_page_merge::broker::DomainName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::options::Pairs;
use super::{ConfigError, Switch};

/// Longest name of a trust domain, in bytes.
pub const MAX_MERGE_DOMAIN_BYTES: usize = 64;

/// The trust domain of machines that the kernel merges and that name none.
pub const DEFAULT_KERNEL_DOMAIN: &str = "default";

/// Keys of `--memory` for merging.
pub const MERGE_FORM: &str =
    "merge=off|owner|kernel[,merge_domain=NAME][,merge_broker=PATH][,merge_across_nodes=on|off]";

/// The component that merges equal pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MergeBackend {
    /// None.
    #[default]
    Off,
    /// The monitor, within a trust domain.
    Owner,
    /// Linux's KSM, with all other processes of the host that use it.
    Kernel,
}

/// Same-page merging of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeConfig {
    /// The component that merges.
    pub backend: MergeBackend,
    /// The trust domain: pages of different domains are never merged. `None`: the machine alone, or
    /// [`DEFAULT_KERNEL_DOMAIN`].
    pub domain: Option<String>,
    /// Socket of the broker through which machines of the domain share pages (`ebb merge-broker`).
    pub broker: Option<PathBuf>,
    /// Whether pages of different NUMA nodes of the host are merged. `None`: yes, or as KSM is set
    /// already.
    pub across_nodes: Option<bool>,
}

/// Merging as given on the command line of a restored or received machine. A value of `None` is
/// taken from the machine's description if that is trusted, or else is the default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MergeOverrides {
    /// The component that merges.
    pub backend: Option<MergeBackend>,
    /// The trust domain.
    pub domain: Option<String>,
    /// Socket of the broker.
    pub broker: Option<PathBuf>,
    /// Whether pages of different NUMA nodes of the host are merged.
    pub across_nodes: Option<Switch>,
}

impl MergeOverrides {
    /// Takes the keys for merging out of `pairs`.
    pub(super) fn take(pairs: &mut Pairs<'_>) -> Result<Self, ConfigError> {
        let domain = match pairs.take("merge_domain") {
            Some(name) if !is_domain(name) => {
                let form = format!(
                    "1 to {MAX_MERGE_DOMAIN_BYTES} letters, digits, dots, dashes and underscores"
                );
                return Err(pairs.error("merge_domain", name, &form));
            }
            name => name.map(str::to_owned),
        };
        let broker = match pairs.take("merge_broker") {
            Some(path @ ("" | "unix:")) => {
                return Err(pairs.error("merge_broker", path, "the path of a broker's socket"));
            }
            // The option of the broker itself accepts the prefix, too.
            path => path.map(|path| PathBuf::from(path.strip_prefix("unix:").unwrap_or(path))),
        };
        Ok(Self {
            backend: pairs.take_word("merge")?,
            domain,
            broker,
            across_nodes: pairs.take_word("merge_across_nodes")?,
        })
    }

    /// Applies the overrides to `saved`.
    ///
    /// # Errors
    /// The contradiction in the result.
    pub fn apply(self, saved: MergeConfig) -> Result<MergeConfig, ConfigError> {
        let backend = self.backend.unwrap_or(saved.backend);
        // Settings of one backend mean nothing to another.
        let saved = if backend == saved.backend { saved } else { MergeConfig::default() };
        let config = MergeConfig {
            backend,
            domain: self.domain.or(saved.domain),
            broker: self.broker.or(saved.broker),
            across_nodes: self.across_nodes.map(Switch::is_on).or(saved.across_nodes),
        };
        config.validate()?;
        Ok(config)
    }
}

impl From<MergeConfig> for MergeOverrides {
    /// All of `config`.
    fn from(config: MergeConfig) -> Self {
        let MergeConfig { backend, domain, broker, across_nodes } = config;
        let across_nodes = across_nodes.map(Switch::from_bool);
        Self { backend: Some(backend), domain, broker, across_nodes }
    }
}

impl MergeConfig {
    /// The broker's socket and the domain, where the monitor shares pages through a broker.
    pub(crate) fn member(&self) -> Option<(&Path, DomainName)> {
        let domain = self.domain.as_ref().filter(|_| self.backend == MergeBackend::Owner)?;
        Some((self.broker.as_deref()?, domain.parse().ok()?))
    }

    /// Checks for contradictions.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let error =
            |problem: &str, remedy: &str| Err(ConfigError::new("--memory", problem, remedy));
        match self.backend {
            MergeBackend::Off => {
                let given = [
                    ("merge_domain", self.domain.is_some()),
                    ("merge_broker", self.broker.is_some()),
                    ("merge_across_nodes", self.across_nodes.is_some()),
                ];
                match given.iter().find(|(_, given)| *given) {
                    Some((key, _)) => error(
                        &format!("`{key}` sets how pages are merged, but `merge` is off"),
                        "add merge=owner or merge=kernel, or leave it out",
                    ),
                    None => Ok(()),
                }
            }
            MergeBackend::Owner if self.broker.is_some() && self.domain.is_none() => error(
                "`merge_broker` is for machines of one trust domain, but `merge_domain` is missing",
                "name the domain",
            ),
            MergeBackend::Kernel if self.broker.is_some() => error(
                "`merge_broker` cannot be used with merge=kernel, \
                 which merges with all processes of the host",
                "use merge=owner, or leave it out",
            ),
            MergeBackend::Owner | MergeBackend::Kernel => Ok(()),
        }
    }

    /// Whether merging is off.
    pub fn is_off(&self) -> bool {
        self.backend == MergeBackend::Off
    }
}

fn is_domain(name: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    (1..=MAX_MERGE_DOMAIN_BYTES).contains(&name.len()) && name.bytes().all(known)
}

/// `--memory` of a restored or received machine: only merging can be changed.
impl FromStr for MergeOverrides {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut pairs = Pairs::parse("--memory", MERGE_FORM, text)?;
        let overrides = Self::take(&mut pairs)?;
        pairs.finish()?;
        Ok(overrides)
    }
}

#[cfg(test)]
mod tests {
    use super::super::MemoryConfig;
    use super::*;

    fn memory(text: &str) -> Result<MergeConfig, ConfigError> {
        let memory: MemoryConfig = format!("size=64M,{text}").parse()?;
        Ok(memory.merge)
    }

    fn problem(text: &str) -> String {
        memory(text).unwrap_err().to_string()
    }

    #[test]
    fn it_is_off_by_default() {
        assert_eq!("64M".parse::<MemoryConfig>().unwrap().merge, MergeConfig::default());
        assert!(memory("merge=off").unwrap().is_off());
        let config =
            memory("merge=owner,merge_domain=red-1,merge_broker=/run/b,merge_across_nodes=off")
                .unwrap();
        assert_eq!(config.backend, MergeBackend::Owner);
        assert_eq!(config.domain.as_deref(), Some("red-1"));
        assert_eq!(config.broker, Some("/run/b".into()));
        assert_eq!(config.across_nodes, Some(false));
        assert_eq!(memory("merge=kernel").unwrap().across_nodes, None);
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(problem("merge=ksm").contains("one of off, owner, kernel"));
        assert!(problem("merge=on").contains("`merge=on`"));
        assert!(problem("merge_domain=red").contains("`merge` is off"));
        assert!(problem("merge=off,merge_across_nodes=on").contains("merge_across_nodes"));
        assert!(problem("merge=owner,merge_across_nodes=1").contains("on, off"));
        assert!(problem("merge=owner,merge_broker=/run/b").contains("name the domain"));
        assert!(problem("merge=kernel,merge_domain=a,merge_broker=/run/b").contains("merge=owner"));
        assert!(problem("merge=owner,merge_domain=").contains("letters"));
        assert!(problem("merge=owner,merge_domain=a b").contains("letters"));
        let long = "a".repeat(MAX_MERGE_DOMAIN_BYTES + 1);
        assert!(problem(&format!("merge=owner,merge_domain={long}")).contains("1 to 64"));
        assert!(problem("merge=owner,merge_domain=a,merge_broker=").contains("socket"));
        assert!(problem("merge=owner,merge_domain=a,merge_broker=unix:").contains("socket"));
    }

    #[test]
    fn a_continued_machine_may_change_merging() {
        let overrides = |text: &str| text.parse::<MergeOverrides>().unwrap();
        let saved = memory("merge=owner,merge_domain=red,merge_broker=/run/b").unwrap();
        assert_eq!(memory("merge=owner,merge_domain=red,merge_broker=unix:/run/b").unwrap(), saved);
        assert_eq!(overrides("").apply(saved.clone()), Ok(saved.clone()));
        let moved = overrides("merge_broker=/run/c").apply(saved.clone()).unwrap();
        assert_eq!(moved, MergeConfig { broker: Some("/run/c".into()), ..saved.clone() });
        assert!(overrides("merge=off").apply(saved.clone()).unwrap().is_off());
        let kernel = overrides("merge=kernel").apply(saved.clone()).unwrap();
        assert_eq!((kernel.domain, kernel.broker), (None, None), "another backend has no broker");
        assert!(overrides("merge=off,merge_domain=red").apply(saved.clone()).is_err());
        assert!(overrides("merge_across_nodes=on").apply(MergeConfig::default()).is_err());
        let error = "size=1G,merge=off".parse::<MergeOverrides>().unwrap_err().to_string();
        assert!(error.contains("`size` is unknown"), "{error}");
    }
}
